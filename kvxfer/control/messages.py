"""What travels on the control channels. PROTOCOL.md is the specification, framing.py the frames.

Bounds stand in the types, so that a value outside them never becomes an object. Checks that need
two fields stand in ``__post_init__``: they raise `InvalidUsage` where a message is built here and
become `ProtocolMismatch` where one is received.
"""

import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvxfer.errors import InvalidUsage

MAX_BLOCK_IDS = 1 << 20
MAX_PLANES = 1 << 16
MAX_GROUPS = 256  # as `KVLayout`
MAX_NEWS = 256
MAX_INT = (1 << 63) - 1
MAX_ERROR_CHARS = 4096
MAX_REQUEST_ID_CHARS = 256

RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID_CHARS)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
Connection = Annotated[str, Meta(max_length=64)]  # as `InitRequest.incarnation`; empty: not said
Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Positive = Annotated[int, Meta(ge=1, le=MAX_INT)]
Blob = Annotated[bytes, Meta(max_length=64 << 10)]
LayoutHash = Annotated[str, Meta(max_length=16)]

_encoder = msgspec.msgpack.Encoder()


class LayoutSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a model's ``KVLayout`` as plain values; ``KVLayout`` judges their meaning."""

    num_layers: Positive
    num_kv_heads: Positive
    head_dim: Positive
    dtype: Name
    block_size: Positive
    order: Name
    kv: Name
    windows: Annotated[list[Count], Meta(max_length=MAX_PLANES)]
    groups: Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_GROUPS)]], Meta(max_length=MAX_PLANES)]

    @property
    def hash(self) -> str:
        """16 hex digits: equal exactly where all fields are, but for one chance in 2**64."""
        return hashlib.blake2b(_encoder.encode(self), digest_size=8).hexdigest()


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of one rank's ``TPLayout`` as plain values; ``TPLayout`` judges their meaning."""

    tp_size: Positive
    tp_rank: Count
    pp_size: Positive
    pp_rank: Count
    layers: tuple[Count, Count] | None


class PlaneSpec(msgspec.Struct, frozen=True, array_like=True):
    """Where a vector of a layer begins: index of its region, and bytes from that one's start."""

    region: Count
    offset_bytes: Count


class InitRequest(msgspec.Struct, frozen=True, kw_only=True, tag="init"):
    """Who calls, its model's layout, which rank it is, and its transports, best first.

    ``incarnation`` names the connection: a caller with several to one server says which.
    ``converts``: the caller will turn what it moves into fp8.
    ``layout_hash``: that of ``layout``, filled in where it is empty.

    Raises:
        InvalidUsage: ``layout_hash`` is that of another layout.
    """

    incarnation: Name
    layout: LayoutSpec
    rank: RankSpec
    transports: Annotated[list[Name], Meta(max_length=32)]
    converts: bool = False
    layout_hash: LayoutHash = ""

    def __post_init__(self) -> None:
        _settle_layout_hash(self)


class InitReply(msgspec.Struct, frozen=True, kw_only=True, tag="init_reply"):
    """The pages of one rank. ``regions`` and ``board`` are opaque bytes of the transport.

    ``planes`` has one entry for each vector of each layer of this rank: layer 0 K, layer 0 V, ...
    ``layout_hash``: that of ``layout``, filled in where it is empty.

    Raises:
        InvalidUsage: a plane names a region that is not there, or ends past 2**63 - 1;
            ``layout_hash`` is that of another layout.
    """

    incarnation: Name
    epoch: Count
    transport: Name
    layout: LayoutSpec
    rank: RankSpec
    num_blocks: Positive
    block_stride_bytes: Positive
    token_stride_bytes: Positive
    head_stride_bytes: Positive
    planes: Annotated[list[PlaneSpec], Meta(min_length=1, max_length=MAX_PLANES)]
    regions: Annotated[list[Blob], Meta(max_length=4096)]
    board: Blob = b""
    layout_hash: LayoutHash = ""

    def __post_init__(self) -> None:
        _settle_layout_hash(self)
        num_regions = len(self.regions)
        # As if the rank had all heads, and a little more: an upper bound in plain arithmetic.
        span_bytes = (
            self.num_blocks * self.block_stride_bytes
            + self.layout.block_size * self.token_stride_bytes
            + self.layout.num_kv_heads * self.head_stride_bytes
        )
        for index, plane in enumerate(self.planes):
            if plane.region >= num_regions:
                raise InvalidUsage(
                    f"planes[{index}].region is {plane.region}, but there are {num_regions} "
                    f"regions; use an index below that"
                )
            if plane.offset_bytes > MAX_INT - span_bytes:
                raise InvalidUsage(
                    f"planes[{index}] at offset {plane.offset_bytes} with {self.num_blocks} blocks "
                    f"{self.block_stride_bytes} bytes apart, slots {self.token_stride_bytes} and "
                    f"heads {self.head_stride_bytes}, ends past {MAX_INT}; check them"
                )


class ReserveRequest(msgspec.Struct, frozen=True, kw_only=True, tag="reserve"):
    """Asks for ``num_blocks`` blocks; ``epoch`` is that of the caller's last `InitReply`.

    ``num_blocks`` counts those of all groups of layers of the server. ``incarnation`` is that of
    `InitRequest`. ``tokens``: the first and the end of what is sent; (0, 0) where the caller does
    not say.

    Raises:
        InvalidUsage: tokens that end before they begin.
    """

    request_id: RequestId
    num_blocks: Annotated[int, Meta(ge=0, le=MAX_BLOCK_IDS)]
    epoch: Count
    incarnation: Connection = ""
    tokens: tuple[Count, Count] = (0, 0)

    def __post_init__(self) -> None:
        if self.tokens[0] > self.tokens[1]:
            raise InvalidUsage(f"tokens {self.tokens} end before they begin; give (first, end)")


class TableSpec(msgspec.Struct, frozen=True, array_like=True):
    """Blocks in the order of a request's tokens, and the token in the first slot of the first."""

    block_ids: Annotated[list[Count], Meta(max_length=MAX_BLOCK_IDS)]
    first_token: Count = 0


class ReserveReply(msgspec.Struct, frozen=True, kw_only=True, tag="reserve_reply"):
    """``granted`` with the blocks, ``wait`` with seconds until a retry, or ``refused``.

    ``tables`` has one entry for each group of layers of the server.

    Raises:
        InvalidUsage: tables without a grant, too many blocks, or a block granted twice.
    """

    request_id: RequestId
    state: Literal["granted", "wait", "refused"]
    tables: Annotated[list[TableSpec], Meta(max_length=MAX_GROUPS)] = []
    retry_after_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.0
    reason: Annotated[str, Meta(max_length=MAX_ERROR_CHARS)] = ""

    def __post_init__(self) -> None:
        if bool(self.tables) != (self.state == "granted"):
            raise InvalidUsage(
                f"state {self.state!r} with {len(self.tables)} block tables; granted has one for "
                "each group of layers, wait and refused have none"
            )
        ids = self.block_ids
        num_ids = len(ids)
        if num_ids > MAX_BLOCK_IDS:
            raise InvalidUsage(f"{num_ids} block ids in all tables; use at most {MAX_BLOCK_IDS}")
        num_distinct = len(set(ids))
        if num_distinct != num_ids:
            raise InvalidUsage(
                f"{num_ids} block ids hold {num_distinct} distinct ones; grant each block once"
            )

    @property
    def block_ids(self) -> list[int]:
        """The blocks of all tables, one table after another."""
        return [one for table in self.tables for one in table.block_ids]


class CommitRequest(msgspec.Struct, frozen=True, tag="commit"):
    """The caller's share of the request is written and visible, or about to be.

    ``sequence`` is the number of its last transfer, which the server looks for on its board; 0
    where the caller does not say. Only servers that count a share once it is there (LMCache's
    pools) take one that is still under way.
    """

    request_id: RequestId
    incarnation: Connection = ""
    sequence: Count = 0


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """The request will not be completed, and every write of the caller to its pages is over.

    Of a request that is committed and filled it frees nothing: those blocks are the engine's.
    ``reason`` is for the engine's log.
    """

    request_id: RequestId
    incarnation: Connection = ""
    reason: Annotated[str, Meta(max_length=MAX_ERROR_CHARS)] = ""


class WatchRequest(msgspec.Struct, frozen=True, tag="watch"):
    """Asks which requests of a connection have failed; says that the caller lives."""

    incarnation: Name


class WatchReply(msgspec.Struct, frozen=True, tag="failed"):
    """What became of the caller's requests at the server, told once; perhaps nothing.

    Attributes:
        failures: the server has given them up, and why. The caller stops writing to them, and then
            says so with abort.
        decided: reservations of the caller that were to wait, and need not: it asks again.
    """

    failures: Annotated[
        list[tuple[RequestId, Annotated[str, Meta(max_length=MAX_ERROR_CHARS)]]],
        Meta(max_length=MAX_NEWS),
    ] = []
    decided: Annotated[list[RequestId], Meta(max_length=MAX_NEWS)] = []


class LeaveRequest(msgspec.Struct, frozen=True, tag="leave"):
    """The caller has unmapped the cache: every write of its connection is over."""

    incarnation: Name


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Commit, abort or leave has taken effect, now or at an earlier repeat.

    ``request_id`` is that of the request; in the answer to leave it holds the incarnation.
    """

    request_id: RequestId


class ErrorReply(msgspec.Struct, frozen=True, tag="error"):
    """A failed call: ``kind`` is the name of a class of `kvxfer.errors`."""

    kind: Name
    message: Annotated[str, Meta(max_length=MAX_ERROR_CHARS)]
    code: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0


def _settle_layout_hash(message: InitRequest | InitReply) -> None:
    found = message.layout.hash
    if not message.layout_hash:
        # Frozen holds from here on; a message under construction is nobody else's yet.
        msgspec.structs.force_setattr(message, "layout_hash", found)
    elif message.layout_hash != found:
        raise InvalidUsage(
            f"layout_hash is {message.layout_hash!r}, but the layout of the same message has "
            f"{found!r}: it has a field that one side does not know, or was damaged; both sides "
            f"must run the same kvxfer"
        )
