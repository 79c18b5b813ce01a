"""Requests before a point that its figures do not hold: connections, handshakes, first kernels.

The client's own warm-up repeats the first prompt, which the prefix cache answers from then on;
these prompts are others.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from kvxfer.pd import client
from kvxfer.pd.result import PDPoint

MAX_OUTPUT_TOKENS: Final = 16
# Ids that every vocabulary of a language model has; special ones lie elsewhere.
_FIRST_ID = 300
_END_ID = 1000


def warm_up(url: str, model: str, point: PDPoint, *, seed: int, timeout_s: float) -> None:
    """Send as many requests at once as the point has in flight, with prompts of its length.

    Raises:
        NotAvailable: the server does not answer in time.
        TransferFailed: it refuses.
    """
    rng = np.random.default_rng(seed)
    prompts = rng.integers(_FIRST_ID, _END_ID, size=(point.concurrency, point.isl))

    def send(number: int) -> None:
        body = {
            "model": model,
            "prompt": prompts[number].tolist(),
            "max_tokens": min(point.osl, MAX_OUTPUT_TOKENS),
            "ignore_eos": True,
            "temperature": 0,
        }
        client.post(url, "/v1/completions", body, timeout_s)

    with ThreadPoolExecutor(point.concurrency) as threads:
        list(threads.map(send, range(point.concurrency)))
