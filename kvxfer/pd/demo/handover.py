"""The time of a hand-over, seen by a client: what a prompt costs more through two engines.

(TTFT - TTFT of the prefill engine alone) + (first gap - median gap): the transfer hides in the one
or in the other, as the proxy answers with the first token of this engine or of that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from kvxfer.pd import client
from kvxfer.pd.client import Answer

_TIMEOUT_S: Final = 120.0
_TRIES: Final = 3  # for each answer that is wanted


@dataclass(frozen=True, slots=True)
class Handover:
    """Medians over several prompts, in seconds.

    Attributes:
        alone_s: TTFT of the prefill engine alone.
        ttft_s: TTFT through both.
        first_gap_s: from the first to the second token.
        gap_s: the median gap of one answer.
        total_s: the hand-over, computed for each prompt before the median is taken.
        least_s, most_s: the smallest and the largest hand-over.
    """

    alone_s: float
    ttft_s: float
    first_gap_s: float
    gap_s: float
    total_s: float
    least_s: float
    most_s: float

    @property
    def is_told_apart(self) -> bool:
        """Whether it is more than chance: of one prompt, that is not known.

        Of three prompts that cost nothing more, one time in twenty exceeds their spread (Lord's u).
        """
        return self.total_s > self.most_s - self.least_s


@dataclass(frozen=True, slots=True)
class Asked:
    """What the prompts gave.

    Attributes:
        answer: the last one through both engines.
        handover: None where too few answers came a token at a time.
    """

    answer: Answer
    handover: Handover | None


def measure_handover(
    front_url: str, prefill_url: str, body: dict[str, Any], num_times: int
) -> Asked:
    """Send one prompt to both ``num_times``, after once unmeasured.

    An answer whose tokens came together, as those of a starved front end do, is asked for again.

    Args:
        front_url: the proxy.
        prefill_url: a prefill engine; its prefix cache must be off.
        body: of `/v1/completions`.
        num_times: 1 or more.

    Raises:
        NotAvailable, TransferFailed: one does not answer, or refuses.
    """
    counted = {**body, "stream_options": {"include_usage": True}}
    pairs: list[tuple[Answer, Answer]] = []
    for number in range(1 + _TRIES * num_times):
        alone = client.complete(prefill_url, {**body, "max_tokens": 1}, _TIMEOUT_S)
        both = client.complete(front_url, counted, _TIMEOUT_S)
        if number and _has_gaps(both):
            pairs.append((alone, both))
        if len(pairs) == num_times:
            break
    return Asked(both, _handover(pairs) if len(pairs) == num_times else None)


def _has_gaps(answer: Answer) -> bool:
    """Whether its median gap is one between two tokens.

    With more than two thirds as many messages as tokens, most messages hold one.
    """
    if answer.num_messages < 3:
        return False
    return answer.num_tokens is None or 3 * answer.num_messages > 2 * answer.num_tokens


def _handover(pairs: Sequence[tuple[Answer, Answer]]) -> Handover:
    first_gaps_s = [both.gaps_s[0] for _, both in pairs]
    gaps_s = [median(both.gaps_s[1:]) for _, both in pairs]
    more_s = [both.ttft_s - alone.ttft_s for alone, both in pairs]
    totals_s = [
        more + first - gap for more, first, gap in zip(more_s, first_gaps_s, gaps_s, strict=True)
    ]
    return Handover(
        alone_s=median(alone.ttft_s for alone, _ in pairs),
        ttft_s=median(both.ttft_s for _, both in pairs),
        first_gap_s=median(first_gaps_s),
        gap_s=median(gaps_s),
        total_s=median(totals_s),
        least_s=min(totals_s),
        most_s=max(totals_s),
    )
