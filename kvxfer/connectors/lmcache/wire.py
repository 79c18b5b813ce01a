"""What goes over LMCache's init and alloc ports: its own messages, each with one field more.

A message is a msgpack map with the class name under ``type``, as ``msgspec.Struct(tag=True)`` of
LMCache writes it (``lmcache/v1/transfer_channel/nixl_channel.py`` and
``lmcache/v1/storage_backend/pd_backend*.py``, 0.5.2 and 0.5.6). LMCache skips fields that it does
not know, so ``kvxfer`` in a legal message asks a peer whether it has kvxfer, and harms none that
has not. What describes a request is the union of what the two PD back ends send.
"""

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from kvxfer.errors import ProtocolMismatch

MAX_KEYS = 1 << 16
MAX_MESSAGE_BYTES = 64 << 20  # LMCache's descriptors of a pool of two million pages
_Text = Annotated[str, Meta(max_length=4096)]
_Count = Annotated[int, Meta(ge=0, le=1 << 53)]
_Message = TypeVar("_Message")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What two sides must have in common, or no key of one is ever found on the other.

    Attributes:
        model: its name.
        world_size: ranks of the engine.
        worker_id: which of them this is.
        dtype: of the cache's elements.
        page_bytes: bytes of a page, which holds one chunk.
        page_shape: the shape of a whole chunk.
        probe: the key of a fixed list of tokens; it differs where the hashes do.
    """

    model: _Text
    world_size: _Count
    worker_id: _Count
    dtype: _Text
    page_bytes: _Count
    page_shape: Annotated[list[_Count], Meta(max_length=16)]
    probe: _Text


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """How a side with kvxfer presents itself.

    Attributes:
        addresses: URLs of its endpoint's channels, for `kvxfer.Endpoint.connect`.
        facts: None where the back end does not say (P2P).
        local_id: the name under which the asking side wants to be written to.
    """

    addresses: Annotated[dict[str, _Text], Meta(max_length=8)]
    facts: Facts | None = None
    local_id: _Text = ""


class NixlInitRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of a sender: metadata of its NIXL agent."""

    local_meta_bytes: bytes
    kvxfer: Hello | None = None


class NixlInitResponse(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer; the first two fields are empty between two sides with kvxfer."""

    remote_agent_name: bytes
    remote_meta_bytes: bytes
    kvxfer: Hello | None = None


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks for pages.

    Attributes:
        connection: its own to the receiver's endpoint.
        wait_s: how long it waits for them; 0 where it does not say.
    """

    connection: Annotated[str, Meta(min_length=1, max_length=4096)]
    wait_s: Annotated[float, Meta(ge=0, le=86400)] = 0.0


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """Pages that the asker alone may write until it commits or aborts them.

    Attributes:
        id: what to commit or abort.
        incarnation: of the endpoint that granted them.
        error: why there are none; empty where there are.
    """

    id: _Text = ""
    incarnation: _Text = ""
    error: _Text = ""


class AllocRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for a page for each key. Fields behind ``last_chunk_toks`` are not of every sender."""

    keys: Annotated[list[_Text], Meta(min_length=1, max_length=MAX_KEYS)]
    fmt: _Count
    shape: Annotated[list[_Count], Meta(min_length=1, max_length=16)]
    dtype: _Text
    last_chunk_toks: _Count
    req_id: _Text = ""
    is_last_batch: bool = False
    total_chunks: _Count = 0
    kvxfer: Asker | None = None


class AllocResponse(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Pages for the keys that are not there yet, in their order; -1 where there is none."""

    remote_indexes: Annotated[
        list[Annotated[int, Meta(ge=-1, le=1 << 53)]], Meta(max_length=MAX_KEYS)
    ]
    already_sent_indexes: Annotated[list[_Count], Meta(max_length=MAX_KEYS)] = []
    kvxfer: Grant | None = None


class CancelNotif(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A sender gives a request up."""

    req_id: _Text
    keys: Annotated[list[_Text], Meta(max_length=MAX_KEYS)]
    kvxfer: Asker | None = None


def encode(message: msgspec.Struct) -> bytes:
    """A message as one frame."""
    return msgspec.msgpack.encode(message)


def decode_request(data: bytes) -> AllocRequest | CancelNotif:
    """One frame as what a sender says on the alloc port.

    Raises:
        ProtocolMismatch: it is no such message.
    """
    return decode(data, AllocRequest | CancelNotif)  # type: ignore[arg-type]


def decode(data: bytes, kind: type[_Message]) -> _Message:
    """One frame as a message of ``kind``.

    Raises:
        ProtocolMismatch: it is none.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:  # the latter where it is all brackets
        raise ProtocolMismatch(f"{len(data)} bytes are no such message: {error}") from error
