"""What the process of a peer library is given, and what it says."""

from typing import Annotated

import msgspec
from msgspec import Meta

from kvxfer.sweep.cases import SweepCase
from kvxfer.sweep.result import SweepResult


class PeerTask(msgspec.Struct, frozen=True, kw_only=True):
    """One case to measure; ``case.peer`` names the row."""

    case: SweepCase
    devices: tuple[int, int]
    num_threads: Annotated[int, Meta(ge=1)]
    iters: int | None
    warmup: int
    seed: int


class Said(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the process: a round is over, or one of these and the end."""

    result: SweepResult | None = None
    error: str = ""
    """The class of :mod:`kvxfer.errors`."""
    message: str = ""
