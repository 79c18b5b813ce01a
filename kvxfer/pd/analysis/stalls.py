"""Gaps that waited for the prefill of another request, counted and expected."""

import math

from kvxfer.pd.result import PDPoint, PDSetup
from kvxfer.pd.summary import Distribution, Stalls

STALL_FACTOR = 3.0
"""A gap is stalled where it is longer than this many median gaps."""


def expected_share(*, concurrency: int, isl: int, osl: int, token_budget: int) -> float:
    """Share of gaps that a prefill falls into, in an engine that does both: 0 to 1.

    In a closed loop each of the other ``concurrency - 1`` requests prefills once while a request
    decodes its ``osl - 1`` gaps, in ``ceil(isl / token_budget)`` steps of the engine::

        f = (c - 1) * ceil(isl / budget) / (osl - 1)

    Every percentile of ITL above 1 - f sees the stall. Shared steps make it fewer, splits more. It
    is of full overlap, each prefill while all others decode: requests of equal length end together,
    and where each takes a time before its first step too, of few in flight down to half is left.
    """
    if osl < 2:
        return 0.0
    return min(1.0, (concurrency - 1) * math.ceil(isl / token_budget) / (osl - 1))


def stalls_of(setup: PDSetup, point: PDPoint, itl: Distribution) -> Stalls | None:
    """The stalled share of a point's gaps; None where it has none.

    The closed form is of one engine in a closed loop: expected where a set-up is aggregated and its
    budget known, with the concurrency spread evenly over its engines.
    """
    if not len(itl):
        return None
    expected = None
    is_closed_loop = point.request_rate is None
    is_one_engine = setup.kind == "aggregated" and setup.num_prefill > 0
    if is_closed_loop and is_one_engine and setup.token_budget is not None:
        expected = expected_share(
            concurrency=max(1, round(point.concurrency / setup.num_prefill)),
            isl=point.isl,
            osl=point.osl,
            token_budget=setup.token_budget,
        )
    limit_ms = STALL_FACTOR * itl.percentile(50)
    return Stalls(limit_ms=limit_ms, share=itl.share_above(limit_ms), expected_share=expected)
