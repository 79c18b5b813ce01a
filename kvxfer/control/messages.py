"""What travels on the control channels, and how it is framed. PROTOCOL.md is the specification.

Bounds stand in the types, so that a value outside them never becomes an object. Checks that need
two fields stand in ``__post_init__``: they raise `InvalidUsage` where a message is built here and
become `ProtocolMismatch` where one is received.
"""

import operator
import struct
from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvxfer.errors import InvalidUsage, ProtocolMismatch

# History of the wire format. Raise it as PROTOCOL.md, "Version rule", says.
#   1: first version.
PROTOCOL_VERSION = 1

MAGIC = b"KVXF"
MAX_MESSAGE_BYTES = 16 << 20
MAX_BLOCK_IDS = 1 << 20
MAX_INT = (1 << 63) - 1
MAX_ERROR_CHARS = 4096

_HEAD = struct.Struct(">4sH")

RequestId = Annotated[str, Meta(min_length=1, max_length=256)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
Connection = Annotated[str, Meta(max_length=64)]  # as `InitRequest.incarnation`; empty: not said
Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Positive = Annotated[int, Meta(ge=1, le=MAX_INT)]
Blob = Annotated[bytes, Meta(max_length=64 << 10)]


class LayoutSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of one rank's ``KVLayout`` as plain values; ``KVLayout`` judges their meaning."""

    num_layers: Positive
    num_kv_heads: Positive
    head_dim: Positive
    dtype: Name
    block_size: Positive
    order: Name
    kv: Name


class PlaneSpec(msgspec.Struct, frozen=True, array_like=True):
    """Where a plane begins: index of its region, and bytes from the start of that region."""

    region: Count
    offset_bytes: Count


class InitRequest(msgspec.Struct, frozen=True, kw_only=True, tag="init"):
    """Who calls, its layout, and the transports that it can use, best first.

    ``incarnation`` names the connection: a caller with several to one server says which.
    """

    incarnation: Name
    layout: LayoutSpec
    transports: Annotated[list[Name], Meta(max_length=32)]


class InitReply(msgspec.Struct, frozen=True, kw_only=True, tag="init_reply"):
    """The pages of one rank. ``regions`` and ``board`` are opaque bytes of the transport.

    Raises:
        InvalidUsage: a plane names a region that is not there, or ends past 2**63 - 1.
    """

    incarnation: Name
    epoch: Count
    transport: Name
    layout: LayoutSpec
    num_blocks: Positive
    block_stride_bytes: Positive
    planes: Annotated[list[PlaneSpec], Meta(min_length=1, max_length=65536)]
    regions: Annotated[list[Blob], Meta(max_length=4096)]
    board: Blob = b""

    def __post_init__(self) -> None:
        num_regions = len(self.regions)
        last_offset = MAX_INT - self.num_blocks * self.block_stride_bytes
        for index, plane in enumerate(self.planes):
            if plane.region >= num_regions:
                raise InvalidUsage(
                    f"planes[{index}].region is {plane.region}, but there are {num_regions} "
                    f"regions; use an index below that"
                )
            if plane.offset_bytes > last_offset:
                raise InvalidUsage(
                    f"planes[{index}] at offset {plane.offset_bytes} with {self.num_blocks} blocks "
                    f"of stride {self.block_stride_bytes} ends past {MAX_INT}; check the three"
                )


class ReserveRequest(msgspec.Struct, frozen=True, kw_only=True, tag="reserve"):
    """Asks for ``num_blocks`` blocks; ``epoch`` is that of the caller's last `InitReply`.

    ``incarnation`` is that of `InitRequest`: ids of different connections never meet.
    """

    request_id: RequestId
    num_blocks: Annotated[int, Meta(ge=1, le=MAX_BLOCK_IDS)]
    epoch: Count
    incarnation: Connection = ""


class ReserveReply(msgspec.Struct, frozen=True, kw_only=True, tag="reserve_reply"):
    """``granted`` with the blocks, ``wait`` with seconds until a retry, or ``refused``.

    Raises:
        InvalidUsage: blocks without a grant, a grant without blocks, or a block granted twice.
    """

    request_id: RequestId
    state: Literal["granted", "wait", "refused"]
    block_ids: Annotated[list[Count], Meta(max_length=MAX_BLOCK_IDS)] = []
    retry_after_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.0
    reason: Annotated[str, Meta(max_length=MAX_ERROR_CHARS)] = ""

    def __post_init__(self) -> None:
        num_ids = len(self.block_ids)
        if (num_ids > 0) != (self.state == "granted"):
            raise InvalidUsage(
                f"state {self.state!r} with {num_ids} block ids; granted has at least one, "
                f"wait and refused have none"
            )
        num_distinct = len(set(self.block_ids))
        if num_distinct != num_ids:
            raise InvalidUsage(
                f"{num_ids} block ids hold {num_distinct} distinct ones; grant each block once"
            )


class CommitRequest(msgspec.Struct, frozen=True, tag="commit"):
    """Every page of the request is written and visible."""

    request_id: RequestId
    incarnation: Connection = ""


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """The request will not be completed, and every write of the caller to its pages is over.

    Of a committed request it frees nothing: those blocks are the engine's.
    """

    request_id: RequestId
    incarnation: Connection = ""


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


_MessageT = TypeVar("_MessageT", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> list[bytes]:
    """Frame a message: ``[head, body]``.

    Raises:
        InvalidUsage: the message holds what msgpack cannot, or is over `MAX_MESSAGE_BYTES`.
    """
    name = type(message).__name__
    try:
        body = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidUsage(f"{name} cannot be encoded: {error}; use plain values") from error
    if len(body) > MAX_MESSAGE_BYTES:
        raise InvalidUsage(
            f"{name} takes {len(body)} bytes, the limit is {MAX_MESSAGE_BYTES}; "
            f"send fewer or smaller items"
        )
    return [_HEAD.pack(MAGIC, PROTOCOL_VERSION), body]


def is_ours(head: bytes) -> bool:
    """Whether a frame is the head of a kvxfer message, of any version."""
    return len(head) == _HEAD.size and head.startswith(MAGIC)


def decode(
    frames: Sequence[bytes], types: type[_MessageT] | tuple[type[_MessageT], ...]
) -> _MessageT:
    """Read ``[head, body]`` as one of ``types``; the body is looked at only if the head matches.

    Args:
        frames: the frames, without routing or call id.
        types: a message type, or a tuple of them told apart by their tags.

    Raises:
        ProtocolMismatch: not a kvxfer message, another version, or a body that breaks the schema.
        InvalidUsage: ``types`` cannot be told apart.
    """
    wanted = types if isinstance(types, tuple) else (types,)
    decoder = decoder_of(wanted)
    _check_head(frames)
    if len(frames) != 2:
        raise ProtocolMismatch(f"message of {len(frames)} frames, version 1 has 2; see PROTOCOL.md")
    if len(frames[1]) > MAX_MESSAGE_BYTES:
        raise ProtocolMismatch(
            f"body of {len(frames[1])} bytes, the limit is {MAX_MESSAGE_BYTES}; send less"
        )
    try:
        message: _MessageT = decoder.decode(frames[1])
    except (msgspec.MsgspecError, RecursionError) as error:
        names = ", ".join(kind.__name__ for kind in wanted)
        raise ProtocolMismatch(
            f"body of {len(frames[1])} bytes is none of {names}: {error}; "
            f"both sides must run the same kvxfer"
        ) from error
    return message


def _check_head(frames: Sequence[bytes]) -> None:
    head = frames[0] if frames else b""
    if not is_ours(head):
        raise ProtocolMismatch(
            f"head {head[:16]!r} of {len(head)} bytes is not that of a kvxfer message "
            f"({MAGIC!r} and a version); the peer is another service"
        )
    version = _HEAD.unpack(head)[1]
    if version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"the peer speaks control protocol version {version}, this side "
            f"{PROTOCOL_VERSION}; install the same kvxfer on both"
        )


@lru_cache(maxsize=256)
def decoder_of(types: tuple[type[msgspec.Struct], ...]) -> msgspec.msgpack.Decoder[Any]:
    """The cached decoder of a union of message types.

    Raises:
        InvalidUsage: no types, something that is not a tagged Struct, or equal tags.
    """
    for kind in types:
        if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            raise InvalidUsage(f"{kind!r} is not a message type; use a msgspec.Struct with a tag")
        if kind.__struct_config__.tag is None:
            raise InvalidUsage(f"{kind.__name__} has no tag; declare it with tag=...")
    if not types:
        raise InvalidUsage("no message types; name at least one")
    try:
        return msgspec.msgpack.Decoder(reduce(operator.or_, types))
    except (TypeError, ValueError) as error:
        names = ", ".join(kind.__name__ for kind in types)
        raise InvalidUsage(
            f"{names} cannot share a channel: {error}; give distinct tags"
        ) from error
