"""How a message becomes frames and back: a head that names the version, then one msgpack map.

Decoding has two phases. The head is judged first, so that a peer of another version is refused by
name whatever its body looks like; only then is the body read, by its schema.
"""

import operator
import struct
from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Any, TypeVar

import msgspec

from kvxfer.errors import InvalidUsage, ProtocolMismatch

# History of the wire format. Raise it as PROTOCOL.md, "Version rule", says.
#   1: first version.
#   2: caches of ranks: a layout is the whole model's and comes with a rank; three strides, and a
#      plane for each layer and vector.
#   3: a request ends with a frame that says how long its caller waits; layouts carry a hash.
#   4: layers form groups: a layout says which, and a grant has a block table for each.
#   5: a pool of LMCache's takes a commit whose transfer is under way.
PROTOCOL_VERSION = 5

MAGIC = b"KVXF"
MAX_MESSAGE_BYTES = 16 << 20

_HEAD = struct.Struct(">4sH")
_OWN_HEAD = _HEAD.pack(MAGIC, PROTOCOL_VERSION)
_LIMIT = struct.Struct(">I")
MAX_LIMIT_MS = 3_600_000

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
    return [_OWN_HEAD, body]


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
    decoder_of(wanted)  # before all else: wrong types are ours, not the peer's
    check_head(frames)
    if len(frames) != 2:
        raise ProtocolMismatch(
            f"message of {len(frames)} frames, version {PROTOCOL_VERSION} has 2; see PROTOCOL.md"
        )
    return _decode_body(frames[1], wanted)


def _decode_body(body: bytes, types: tuple[type[_MessageT], ...]) -> _MessageT:
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolMismatch(
            f"body of {len(body)} bytes, the limit is {MAX_MESSAGE_BYTES}; send less"
        )
    try:
        message: _MessageT = decoder_of(types).decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        names = ", ".join(kind.__name__ for kind in types)
        raise ProtocolMismatch(
            f"body of {len(body)} bytes is none of {names}: {error}; "
            f"both sides must run the same kvxfer"
        ) from error
    return message


def encode_limit(left_s: float) -> bytes:
    """The last frame of a request: how long its caller waits, in whole milliseconds, at least 1."""
    return _LIMIT.pack(min(max(1, round(left_s * 1000)), MAX_LIMIT_MS))


def decode_request(
    frames: Sequence[bytes], types: tuple[type[_MessageT], ...]
) -> tuple[_MessageT, float]:
    """Read ``[head, body, limit]``; returns the message and the seconds that its caller waits.

    Raises:
        ProtocolMismatch: what `decode` raises, or a limit that is none.
    """
    check_head(frames)
    if len(frames) != 3 or len(frames[2]) != _LIMIT.size:
        raise ProtocolMismatch(
            f"request of frames of {', '.join(str(len(frame)) for frame in frames)} bytes; version "
            f"{PROTOCOL_VERSION} has a head, a body and {_LIMIT.size} bytes of limit_ms; "
            f"see PROTOCOL.md"
        )
    limit_ms = _LIMIT.unpack(frames[2])[0]
    if not 1 <= limit_ms <= MAX_LIMIT_MS:
        raise ProtocolMismatch(f"limit_ms of the request is {limit_ms}; use 1 to {MAX_LIMIT_MS}")
    return _decode_body(frames[1], types), limit_ms / 1000


def check_head(frames: Sequence[bytes]) -> None:
    """The first phase of decoding: whether the frames are of this version at all.

    Raises:
        ProtocolMismatch: not a kvxfer message, or another version.
    """
    head = frames[0] if frames else b""
    if head == _OWN_HEAD:
        return
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
