"""What the sweep says to its peer process, on a control channel of its own."""

from typing import Annotated

import msgspec
from msgspec import Meta

from kvxfer.control import LayoutSpec

_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Ids = Annotated[list[_Count], Meta(max_length=1 << 20)]
_Text = Annotated[str, Meta(max_length=64)]


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_prepare"):
    """Allocate a pool and serve it; what was prepared before is released first."""

    layout: LayoutSpec
    num_blocks: _Count
    memory: _Text
    device: Annotated[int, Meta(ge=-1, lt=1 << 16)]
    transport: _Text
    num_threads: Annotated[int, Meta(ge=1, le=256)]


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_prepared"):
    """The addresses of the prepared endpoint."""

    addresses: dict[str, str]


class Fill(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_fill"):
    """Write the pattern of ``seed``; no ids = all blocks."""

    seed: _Count
    block_ids: _Ids = []


class FillPrefix(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_fill_prefix"):
    """Write the pattern of ``seed`` into the first bytes of the pool."""

    seed: _Count
    num_bytes: _Count


class Check(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_check"):
    """Compare blocks with the pattern of the source's blocks."""

    seed: _Count
    block_ids: _Ids
    source_ids: _Ids


class CheckPrefix(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_check_prefix"):
    """Compare the first bytes of the pool with those of the source's pool."""

    seed: _Count
    num_bytes: _Count


class Checked(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_checked"):
    """What a check found; ``first_page`` means nothing where no word is wrong."""

    num_wrong_words: _Count
    first_page: _Count


class Compute(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_compute"):
    """Start a compute load on the peer's GPU, or stop it."""

    kind: _Text
    running: bool


class Computed(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_computed"):
    """Median time of one operation of the load since it was started; 0 when it just began."""

    operation_us: float


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_release"):
    """Free what was prepared."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="sweep_ready"):
    """Done."""


REPLIES = (Prepared, Checked, Computed, Ready)
