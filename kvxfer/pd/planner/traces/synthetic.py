"""Loads that are made: requests of one size, in a closed or an open loop."""

import numpy as np

from kvxfer.errors import InvalidUsage
from kvxfer.pd.planner.trace import Request, Trace


def closed_loop(
    *,
    isl: int,
    osl: int,
    concurrency: int,
    num_requests: int | None = None,
    shared_tokens: int = 0,
) -> Trace:
    """``concurrency`` requests in flight at all times: the next is sent when one ends.

    As ``vllm bench serve --request-rate inf --max-concurrency C``.

    Args:
        isl, osl: tokens in and out of each request.
        num_requests: None: ten times the concurrency.
        shared_tokens: with which every prompt begins alike.

    Raises:
        InvalidUsage: a number is outside its limits.
    """
    if not 0 <= shared_tokens <= isl:
        raise InvalidUsage(f"shared_tokens is {shared_tokens}; use 0 to the {isl} of a prompt")
    count = 10 * concurrency if num_requests is None else num_requests
    request = Request(0.0, isl, osl, (0,) if shared_tokens else ())
    return Trace(
        f"{isl} in, {osl} out, {concurrency} in flight",
        (request,) * max(0, count),
        concurrency=concurrency,
        hash_tokens=max(1, shared_tokens),
    )


def open_loop(
    *,
    isl: int,
    osl: int,
    requests_per_s: float,
    num_requests: int,
    burstiness: float = 1.0,
    seed: int = 0,
) -> Trace:
    """Requests at a rate, whatever is in flight.

    Times between them are of a gamma distribution with shape ``burstiness``: 1 is a Poisson
    process, less is burstier. All are scaled so that the last request comes ``num_requests /
    requests_per_s`` after the first wait began, and the rate is kept whatever was drawn, as in
    ``vllm bench serve``. The trace begins with its first request.

    Raises:
        InvalidUsage: a number is outside its limits.
    """
    if not 0.0 < requests_per_s < 1e6 or not 0.0 < burstiness < 1e6:
        raise InvalidUsage(
            f"requests_per_s is {requests_per_s}, burstiness {burstiness}; use above 0, below 1e6"
        )
    waits = np.random.default_rng(seed).gamma(burstiness, size=max(0, num_requests))
    ends = np.cumsum(waits)
    # Bursts so dense that every wait is rounded to none stay at once, as in vLLM.
    scale_s = num_requests / requests_per_s / ends[-1] if ends.any() else 0.0
    arrivals_s = (ends - waits[:1]) * scale_s
    name = f"{isl} in, {osl} out, {requests_per_s:g} a second"
    return Trace(name, tuple(Request(float(at_s), isl, osl) for at_s in arrivals_s))
