"""The messages of ``csrc/ucx/wire.hpp``, written once more in Python, and a raw connection."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from transport_pairs import Pair

from kvxfer import _core
from kvxfer.control import ControlClient, InitReply, InitRequest
from kvxfer.errors import KvxferError
from kvxfer.session.layouts import layout_spec, rank_spec
from kvxfer.transport.ucx import library_candidates

HELLO, WELCOME, PUT, GET, GO, PIECE, FINISH, DONE, FAIL = range(9)
GUARD_S = 15.0  # before a side gives up what stands still
SETTLE_S = 0.5


@dataclass
class Box:
    """A box of a side's plan; by default one plane of one segment of one row."""

    run_bytes: int
    first_plane: int = 0
    num_planes: int = 1
    first_segment: int = 0
    num_segments: int = 1
    block_stride: int = 0
    slot_stride: int = 0
    outer: tuple[int, int, int] = (1, 0, 0)  # count, step of the scale, stride
    inner: tuple[int, int, int] = (1, 0, 0)
    first_scale: int = 0
    scale_plane_step: int = 0

    def packed(self) -> bytes:
        return struct.pack(
            "<4I2Q2IQ2IQQ2I",
            *(self.first_plane, self.num_planes, self.first_segment, self.num_segments),
            *(self.block_stride, self.slot_stride, *self.outer, *self.inner),
            *(self.run_bytes, self.first_scale, self.scale_plane_step),
        )


def plan(
    planes: Sequence[int],
    boxes: Sequence[Box],
    *,
    segments: Sequence[tuple[int, int]] = ((0, 0),),
    scales: Sequence[float] = (),
    conversion: int = 0,
) -> bytes:
    """An encoded SidePlan."""
    counts = (len(planes), len(segments), len(boxes), len(scales), conversion, 0)
    return b"".join(
        [
            struct.pack("<6I", *counts),
            struct.pack(f"<{len(planes)}Q", *planes),
            *(struct.pack("<2I", *at) for at in segments),
            *(box.packed() for box in boxes),
            struct.pack(f"<{len(scales)}f", *scales),
        ]
    )


def begin(transfer: int = 1, sequence: int = 1, direct_bytes: int = 1 << 20) -> bytes:
    """The header of PUT and GET."""
    return struct.pack("<3Q", transfer, sequence, direct_bytes)


def piece(
    first_row: int = 0, num_rows: int = 1, first_byte: int = 0, box: int = 0, transfer: int = 1
) -> bytes:
    """The header of PIECE."""
    return struct.pack("<4Q2I", transfer, first_row, num_rows, first_byte, box, 0)


class RawPeer:
    """A connection to a pair's far side that sends what it is told; made anew when it was dropped.

    Attributes:
        reply: what the far side said of itself.
        regions: (address, length) of each region over there.
    """

    def __init__(self, pair: Pair) -> None:
        own = pair.local.cache.shard
        request = InitRequest(
            incarnation=pair.local.endpoint.incarnation,
            layout=layout_spec(own.model),
            rank=rank_spec(own.rank),
            transports=["ucx"],
        )
        with ControlClient(pair.remote_opened["addresses"]["init"], InitReply) as client:
            self.reply = client.call(request)
        specs = [msgspec.msgpack.decode(region) for region in self.reply.regions]
        self.regions = [(spec["address"], spec["num_bytes"]) for spec in specs]
        self._server = specs[0]["server"]
        _core.ucx_load(library_candidates())
        self._context = _core.UcxContext([], [("NET_DEVICES", "lo")])
        self._link: Any = None

    def connect(self, **changes: Any) -> Any:
        """A new native link; ``changes`` replace its arguments."""
        server = self._server
        link = _core.UcxLink(
            **{
                "context": self._context,
                "host": server["host"],
                "port": server["port"],
                "secret": server["secret"],
                "slot": 0,
                "name": "the peer",
                "num_threads": 1,
                "settings": _core.UcxSettings(connect_s=GUARD_S),
                **changes,
            }
        )
        while not link.poll(0.2):
            pass
        return link

    def send(self, *messages: tuple[int, bytes, bytes], wait_s: float = GUARD_S) -> str:
        """Send (message, header, data) one behind another; returns what the far side says to it.

        That is its error, ``done``, or nothing within ``wait_s``.
        """
        if self._link is None:
            self._link = self.connect()
        try:
            for message in messages:
                self._link.send_raw(*message)
            return "done" if self._link.poll(wait_s) else ""
        except KvxferError as error:
            self.drop()
            return f"{type(error).__name__}: {error}"

    def drop(self) -> None:
        """End the connection."""
        if self._link is not None:
            self._link.close()
            self._link = None
