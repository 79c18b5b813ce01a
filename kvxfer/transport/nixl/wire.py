"""The messages of a connection, each a NIXL notification.

N posts (the near side), F serves its regions (the far side). One transfer at a time::

    HELLO N>F, WELCOME F>N                      once
    BEGIN N>F, GO F>N                           the far side stands by its cache
    SCATTER N>F, SLOT F>N                       a put's piece, written into F's slot before
    GATHER N>F, SLOT F>N                        a get's piece, which N reads from F's slot then
    FINISH N>F, DONE F>N                        all is in place; the board says so
    FAIL F>N                                    instead of what was due
    LEAVE N>F                                   the connection ends
    PARTED either way                           the whole agent ends

A notification that comes with a WRITE arrives once the bytes are visible. SCATTER and GATHER hold
F's half of the piece (:mod:`kvxfer.transport.nixl.pieces`), and SLOT answers when F's copy is over.

Version 2: slots may lie in device memory; the halves travel in messages instead of in the slots.
"""

import struct
from enum import IntEnum
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from kvxfer.errors import ProtocolMismatch
from kvxfer.memory.wire import Address, Device
from kvxfer.transport.board import NUM_SLOTS
from kvxfer.transport.process import ProcessSpec

VERSION = 2
ID_BYTES = 16
SECRET_BYTES = 16
MAX_MESSAGE_BYTES = 64 << 10
MAX_METADATA_BYTES = 32 << 10
MAX_TEXT = 1000
_HEADER = struct.Struct("<16sBBxxxxxxQ")

_Spec = TypeVar("_Spec", bound=msgspec.Struct)


class Kind(IntEnum):
    """What a message says."""

    HELLO = 1
    WELCOME = 2
    BEGIN = 3
    GO = 4
    SCATTER = 5
    GATHER = 6
    SLOT = 7
    FINISH = 8
    DONE = 9
    FAIL = 10
    LEAVE = 11
    PARTED = 12


class Message(NamedTuple):
    """One message.

    Attributes:
        connection: 16 bytes that the near side drew.
        kind: what it says.
        slot: the staging slot that it speaks of.
        number: of the transfer.
        body: of HELLO, WELCOME, SCATTER, GATHER and FAIL.
    """

    connection: bytes
    kind: Kind
    slot: int = 0
    number: int = 0
    body: bytes = b""

    def encode(self) -> bytes:
        """As it travels."""
        head = (self.connection, self.kind, self.slot, self.number)
        return _HEADER.pack(*head) + self.body


def decode(data: bytes) -> Message | None:
    """The message; None for bytes that are none."""
    if not _HEADER.size <= len(data) <= MAX_MESSAGE_BYTES:
        return None
    connection, kind, slot, number = _HEADER.unpack_from(data)
    try:
        return Message(connection, Kind(kind), slot, number, data[_HEADER.size :])
    except ValueError:
        return None


_Metadata = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_METADATA_BYTES)]


class Hello(msgspec.Struct, frozen=True):
    """Who connects: the secret of the regions' metadata, and how answers reach it.

    ``in_device``: the slots of a side with pages on a GPU lie in its memory, not in the host's.
    """

    version: int
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    slot: Annotated[int, msgspec.Meta(ge=0, lt=NUM_SLOTS)]
    process: ProcessSpec
    host: Annotated[str, msgspec.Meta(max_length=64)]
    in_device: bool
    metadata: _Metadata


class Welcome(msgspec.Struct, frozen=True):
    """Where the far side's slots are, and the number of the last transfer on its slot of the board.

    ``device``: the CUDA device of the far side that has them, or -1 for host memory.
    """

    address: Address
    slot_bytes: Annotated[int, msgspec.Meta(ge=1 << 17, le=1 << 28)]
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=64)]
    device: Device
    sequence: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    metadata: _Metadata


class Fail(msgspec.Struct, frozen=True):
    """A refusal: the name of an error's class, and its text."""

    error: Annotated[str, msgspec.Meta(max_length=64)]
    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


def read_body(message: Message, kind: type[_Spec]) -> _Spec:
    """The body of a message.

    Raises:
        ProtocolMismatch: it is not what this version writes.
    """
    try:
        return msgspec.msgpack.decode(message.body, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolMismatch(
            f"{len(message.body)} bytes are no {kind.__name__}: {error}; both sides need one "
            "version of kvxfer"
        ) from error
