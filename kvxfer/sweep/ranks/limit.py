"""The contiguous copies that a row is compared with, and what the hardware allows them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.sweep.messages import ByteRange, PeerPlan

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class LimitCopy:
    """As many bytes as one rank sends another, as one range.

    Attributes:
        source: the source rank.
        destination: the destination rank.
        source_range: bytes of the source's pool.
        destination_range: bytes of the destination's pool, of equal content once copied.
    """

    source: int
    destination: int
    source_range: ByteRange
    destination_range: ByteRange

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return self.source_range.num_bytes


def limit_copies(plans: Sequence[Sequence[PeerPlan]], *, put: bool) -> list[LimitCopy]:
    """One range a pair of ranks, those of one rank side by side in its pool.

    Args:
        plans: for each rank that copies, its plans to its peers.
        put: whether those ranks are the sources.
    """
    copies: list[LimitCopy] = []
    used: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
    for rank, own in enumerate(plans):
        for plan in own:
            pair = (rank, plan.peer) if put else (plan.peer, rank)
            key = len(copies)
            ranges = [
                ByteRange(side[place], plan.num_bytes, key)
                for side, place in zip(used, pair, strict=True)
            ]
            copies.append(LimitCopy(*pair, *ranges))
            for side, place in zip(used, pair, strict=True):
                side[place] += -(-plan.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return copies


def physical_limit(
    copies: Sequence[LimitCopy],
    devices: Sequence[tuple[int, int]],
    link_limits: Sequence[float | None],
) -> float | None:
    """GB/s of all copies together where the GPU that sends or receives most is the slowest.

    Args:
        copies: who sends how much to whom.
        devices: the GPUs of each copy's source and destination.
        link_limits: GB/s one way of every pair of ranks; the fastest is taken for all.
    """
    known = [limit for limit in link_limits if limit is not None]
    if not known or len(known) < len(link_limits):
        return None
    traffic: Counter[tuple[str, int]] = Counter()
    for copy, (source, destination) in zip(copies, devices, strict=True):
        traffic["out", source] += copy.num_bytes
        traffic["in", destination] += copy.num_bytes
    return max(known) * traffic.total() / 2 / max(traffic.values())
