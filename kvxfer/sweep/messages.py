"""What the sweep says to the processes of its ranks, on a control channel of its own."""

from typing import Annotated

import msgspec
from msgspec import Meta

from kvxfer.control import LayoutSpec, RankSpec
from kvxfer.errors import VerificationError
from kvxfer.tuning import Profile

MAX_RANKS = 256
_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Ids = Annotated[list[_Count], Meta(max_length=1 << 20)]
_Text = Annotated[str, Meta(max_length=256)]
_WORD_BYTES = 8


class ByteRange(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a pool; ranges of one key and one seed have equal contents."""

    offset_bytes: _Count
    num_bytes: _Count
    key: Annotated[int, Meta(ge=0, lt=MAX_RANKS * MAX_RANKS >> 1)] = 0


_Ranges = Annotated[list[ByteRange], Meta(max_length=MAX_RANKS)]


class Meet(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_meet"):
    """Be the far side of the sweep ``incarnation``, and of no other until it has left or gone."""

    incarnation: Annotated[str, Meta(min_length=1, max_length=64)]


class Met(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_met"):
    """What :func:`kvxfer.sweep.environment.environment` says over there."""

    environment: Annotated[dict[_Text, Annotated[str, Meta(max_length=4096)]], Meta(max_length=64)]


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_leave"):
    """The sweep has ended."""

    incarnation: Annotated[str, Meta(min_length=1, max_length=64)]


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_prepare"):
    """Allocate one rank's pool and serve it; what was prepared before is released first.

    ``num_threads`` fill and check, ``copy_threads`` copy; None = the measured best. ``tuning`` is
    the profile to go by; None = this process's own.
    """

    layout: LayoutSpec
    rank: RankSpec
    num_blocks: _Count
    memory: _Text
    device: Annotated[int, Meta(ge=-1, lt=1 << 16)]
    transport: _Text
    num_threads: Annotated[int, Meta(ge=1, le=256)]
    copy_threads: Annotated[int, Meta(ge=1, le=256)] | None = None
    tuning: Profile | None = None


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_prepared"):
    """The addresses of the prepared endpoint."""

    addresses: dict[str, str]


class Connect(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_connect"):
    """Connect to all ranks of the other side, to copy by ``op``."""

    addresses: Annotated[list[dict[str, str]], Meta(min_length=1, max_length=MAX_RANKS)]
    op: _Text
    converts: bool


class Connected(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_connected"):
    """What the hardware can carry to each of them one way, GB/s; None where nothing says so."""

    physical_limits_gb_per_s: list[float | None]


class Fill(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_fill"):
    """Write the pattern of ``seed``; no ids = all blocks."""

    seed: _Count
    block_ids: _Ids = []


class FillRanges(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_fill_ranges"):
    """Write the pattern of ``seed`` into bytes of the pool."""

    seed: _Count
    ranges: _Ranges


class Check(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_check"):
    """Compare the first tokens of a request with the pattern of the source's blocks.

    ``converted_from`` is the dtype that they had before they became fp8, or ``none``.
    """

    seed: _Count
    num_tokens: _Count
    block_ids: _Ids
    source_ids: _Ids
    source_block_size: Annotated[int, Meta(ge=1)]
    converted_from: _Text


class CheckOutside(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_check_outside"):
    """Compare all slots that the request does not take with what they were filled with."""

    seed: _Count
    num_tokens: _Count
    block_ids: _Ids


class CheckRanges(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_check_ranges"):
    """Compare bytes of the pool with the ranges of the same keys that were filled elsewhere."""

    seed: _Count
    ranges: _Ranges


class Checked(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_checked"):
    """What a check found, counted in units of ``unit`` bytes; ``first`` says where the first is."""

    num_wrong: _Count
    num_checked: _Count
    unit: Annotated[int, Meta(ge=1, le=8)] = _WORD_BYTES
    first: _Text = ""

    def require_none_wrong(self, what: str) -> None:
        """Raise where something is wrong.

        Raises:
            VerificationError: says how much of ``what``, and where the first is.
        """
        if self.num_wrong == 0:
            return
        units = f"{self.unit}-byte words" if self.unit > 1 else "bytes"
        raise VerificationError(
            f"{what}: {self.num_wrong} of {self.num_checked} {units} are wrong at the destination, "
            f"the first in {self.first}"
        )


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_plan"):
    """Plan what this rank copies of a request, for the next :class:`Start`."""

    num_tokens: _Count
    own_ids: _Ids
    other_ids: _Ids


class PlanRanges(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_plan_ranges"):
    """Plan contiguous copies instead, at most one a peer: its index, bytes here, bytes there."""

    copies: Annotated[list[tuple[_Count, ByteRange, ByteRange]], Meta(max_length=MAX_RANKS)]


class PeerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan to one peer."""

    peer: _Count
    num_bytes: _Count
    num_pages: _Count
    runs: dict[int, int]
    """Contiguous runs by their length in bytes, as read."""


class Planned(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_planned"):
    """How long planning took, and the plans that copy anything."""

    plan_us: float
    plans: list[PeerPlan]


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_start"):
    """Post the plans at an instant of CLOCK_MONOTONIC, and wait for all of them.

    ``as_limit`` takes the fastest way of the path instead of ``engine`` and ``num_sms``.
    """

    at_ns: _Count
    engine: _Text = "auto"
    num_sms: _Count = 0
    as_limit: bool = False


class Ran(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_ran"):
    """When a rank began to post, had posted, and saw the last byte delivered; CLOCK_MONOTONIC.

    ``num_sms`` is the largest SM budget of its copies.
    """

    late: bool
    begin_ns: _Count
    posted_ns: _Count
    end_ns: _Count
    paths: list[str]
    num_sms: _Count = 0


class Compute(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_compute"):
    """Start a compute load on the peer's GPU, or stop it."""

    kind: _Text
    running: bool


class Computed(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_computed"):
    """Median time of one operation of the load since it was started; 0 when it just began."""

    operation_us: float


class OpenPeer(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_open_peer"):
    """Let a library of :mod:`kvxfer.sweep.peers` reach what was prepared; ``row`` names its use."""

    row: _Text


class OpenedPeer(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_opened_peer"):
    """Where the pool lies, and what the library's near side must know of this one."""

    address: _Count
    device: Annotated[int, Meta(ge=-1, lt=1 << 16)]
    contact: Annotated[bytes, Meta(max_length=1 << 20)]


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_release"):
    """Free what was prepared."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_ready"):
    """Done."""


REPLIES = (Met, Prepared, Connected, Checked, Planned, Ran, Computed, OpenedPeer, Ready)
