"""Which rows a sweep has besides its own."""

from collections.abc import Sequence
from dataclasses import replace

from kvxfer.sweep.cases import SweepCase
from kvxfer.sweep.peers.registry import PEERS
from kvxfer.sweep.result import Skipped


def add_peers(
    cases: Sequence[SweepCase], names: Sequence[str]
) -> tuple[list[SweepCase], list[Skipped]]:
    """The cases, each shape followed by its rows of the peers ``names``; and who cannot have one.

    A peer moves each shape once, in the memory that it is best at of those that are swept.
    """
    memories = {case.memory for case in cases}
    rows: list[tuple[str, str]] = []
    skipped: list[Skipped] = []
    for name in names:
        library = PEERS[name]
        memory = next((one for one in library.memory if one in memories), "")
        if not memory:
            swept = ", ".join(sorted(memories))
            reason = f"moves pages in {' or '.join(library.memory)} memory; this run has {swept}"
        else:
            reason = library.missing()
        if reason:
            skipped.append(Skipped(name, reason, False))
        else:
            rows += [(row.name, memory) for row in library.rows]
    if not rows:
        return list(cases), skipped
    found: list[SweepCase] = []
    for own in _by_shape(cases).values():
        found += own
        found += [replace(own[0], memory=memory, num_sms=0, peer=row) for row, memory in rows]
    return found, skipped


def _by_shape(cases: Sequence[SweepCase]) -> dict[SweepCase, list[SweepCase]]:
    shapes: dict[SweepCase, list[SweepCase]] = {}
    for case in cases:
        shapes.setdefault(replace(case, memory="", num_sms=0), []).append(case)
    return shapes
