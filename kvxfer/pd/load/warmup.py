"""Requests before a point that its figures do not hold: connections, handshakes, first kernels.

The client's own warm-up repeats the first prompt, which the prefix cache answers from then on;
these prompts are others.
"""

from typing import Final

import numpy as np

from kvxfer.pd import client
from kvxfer.pd.result import PDPoint

MAX_OUTPUT_TOKENS: Final = 16
_MAX_AT_A_RATE: Final = 8  # there concurrency is a limit, not what is in flight
# Ids that every vocabulary of a language model has; special ones lie elsewhere.
_FIRST_ID = 300
_END_ID = 1000


def warm_up(url: str, model: str, point: PDPoint, *, seed: int, timeout_s: float) -> None:
    """Send as many requests at once as the point has in flight, with prompts of its length.

    At a finite rate a few: what is in flight then is not known before.

    Raises:
        NotAvailable: the server does not answer in time.
        TransferFailed: it refuses.
    """
    rng = np.random.default_rng(seed)
    is_closed_loop = point.request_rate is None
    count = point.concurrency if is_closed_loop else min(point.concurrency, _MAX_AT_A_RATE)
    prompts = rng.integers(_FIRST_ID, _END_ID, size=(count, point.isl))
    bodies = [
        {
            "model": model,
            "prompt": prompt.tolist(),
            "max_tokens": min(point.osl, MAX_OUTPUT_TOKENS),
            "ignore_eos": True,
            "temperature": 0,
        }
        for prompt in prompts
    ]
    client.post_all(url, "/v1/completions", bodies, timeout_s)
