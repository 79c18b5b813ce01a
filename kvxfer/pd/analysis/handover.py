"""The hand-over between engines, which no client sees by itself.

For one request at a time::

    hand-over = (TTFT - TTFT of the prefill engine alone) + (first gap - median gap)

Proxies differ in where the transfer falls: before the first token where the decode engine sends it,
into the first gap where the prefill engine's token is passed on. The sum holds it either way. The
figures of the prefill engine alone and of the median gap are medians, so that the sum is a sample a
request.
"""

import numpy as np

from kvxfer.pd.analysis.replies import Replies
from kvxfer.pd.summary import Distribution, Handover, PointSummary, SetupSummary


def baseline_ttft_ms(alone: list[SetupSummary], isl: int, beside: SetupSummary) -> float | None:
    """Median TTFT of a prefill engine alone, one request at a time; None where none was measured.

    Only an engine of the same model and parallel size, with prompts as long, stands for it.
    """
    like = (beside.setup.model, beside.setup.prefill_tp)
    for one in alone:
        if (one.setup.model, one.setup.prefill_tp) == like:
            for point in one.points:
                if (point.load.isl, point.concurrency) == (isl, 1) and len(point.ttft):
                    return point.ttft.percentile(50)
    return None


def handover_of(replies: Replies, summary: PointSummary, alone_ms: float) -> Handover | None:
    """The hand-over of each reply with a gap; None above one request at a time, or without gaps.

    ``alone_ms`` is what :func:`baseline_ttft_ms` found; above one at a time TTFT holds queueing.
    """
    streams = [reply for reply in replies.completed if len(reply.gaps_ms)]
    if summary.concurrency != 1 or not streams or not len(summary.later_gaps):
        return None
    prefill_ms = np.array([reply.ttft_ms for reply in streams]) - alone_ms
    gap_ms = np.array([reply.gaps_ms[0] for reply in streams])
    gap_ms -= summary.later_gaps.percentile(50)
    return Handover(*map(Distribution.of, (prefill_ms, gap_ms, prefill_ms + gap_ms)))
