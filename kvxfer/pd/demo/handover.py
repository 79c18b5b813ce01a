"""The time of a hand-over, seen by a client: what a prompt costs more through two engines.

(TTFT - TTFT of the prefill engine alone) + (first gap - median gap): the transfer hides in the one
or in the other, as the proxy answers with the first token of this engine or of that.
"""

from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from kvxfer.errors import TransferFailed
from kvxfer.pd import client
from kvxfer.pd.client import Answer

_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Handover:
    """Medians over several prompts.

    Attributes:
        answer: the last answer through both engines.
        alone_s: TTFT of the prefill engine alone.
        ttft_s: TTFT through both.
        first_gap_s: from the first to the second token.
        gap_s: the median gap of one answer.
        total_s: the hand-over, computed for each prompt before the median is taken.
    """

    answer: Answer
    alone_s: float
    ttft_s: float
    first_gap_s: float
    gap_s: float
    total_s: float


def measure_handover(
    front_url: str, prefill_url: str, body: dict[str, Any], num_times: int
) -> Handover:
    """Send one prompt to both ``num_times``, after once unmeasured.

    Args:
        front_url: the proxy.
        prefill_url: a prefill engine; its prefix cache must be off.
        body: of `/v1/completions`.
        num_times: 1 or more.

    Raises:
        NotAvailable, TransferFailed: one does not answer, refuses, or answers with
            fewer than three tokens.
    """
    pairs = []
    for _ in range(num_times + 1):
        alone = client.complete(prefill_url, {**body, "max_tokens": 1}, _TIMEOUT_S)
        pairs.append((alone, client.complete(front_url, body, _TIMEOUT_S)))
    measured = pairs[1:]
    if any(len(both.gaps_s) < 2 for _, both in measured):
        raise TransferFailed("an answer ended before its third token, so it has no median gap")
    first_gaps_s = [both.gaps_s[0] for _, both in measured]
    gaps_s = [median(both.gaps_s[1:]) for _, both in measured]
    more_s = [both.ttft_s - alone.ttft_s for alone, both in measured]
    return Handover(
        answer=measured[-1][1],
        alone_s=median(alone.ttft_s for alone, _ in measured),
        ttft_s=median(both.ttft_s for _, both in measured),
        first_gap_s=median(first_gaps_s),
        gap_s=median(gaps_s),
        total_s=median(
            more + first - gap
            for more, first, gap in zip(more_s, first_gaps_s, gaps_s, strict=True)
        ),
    )
