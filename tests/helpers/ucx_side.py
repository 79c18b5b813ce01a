"""One side of a transfer without a control plane, in this process or as a program of its own.

``ucx_side.py serve HOST`` prints what a peer needs, waits for a line, and prints the sum of its
bytes. ``ucx_side.py put HOST DESCRIPTION COUNT`` prints ``started``, puts COUNT times as many ones
as the server has bytes, and prints the path that they took.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvxfer import KVCache, KVLayout
from kvxfer.layout import CopyPlan
from kvxfer.transport import Board, Op
from kvxfer.transport.ucx import UcxTransport

NUM_BYTES = 32 << 20
_LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float16", block_size=16)
_NUM_BLOCKS = NUM_BYTES // _LAYOUT.block_bytes


class Side:
    """Memory of one value, registered, and a transport that serves it on ``host``."""

    def __init__(self, host: str, value: int) -> None:
        self.memory = np.full(NUM_BYTES, value, np.uint8)
        self.cache = KVCache(_LAYOUT, self.memory)
        self.board = Board()
        self.transport = UcxTransport(2)
        self.transport.serve(self.board, host)
        self.export = self.transport.export(self.cache.registrations[0])

    @property
    def description(self) -> str:
        """What a peer needs."""
        board = self.board.describe(self.board.take_slot())
        return json.dumps({"region": self.export.metadata.hex(), "board": board.hex()})

    @property
    def num_connections(self) -> int:
        """Peers that are connected."""
        server: Any = self.transport._server
        return int(server._native.num_connections)


@contextmanager
def side(host: str, value: int) -> Iterator[Side]:
    """A side that ends with the block."""
    made = Side(host, value)
    try:
        yield made
    finally:
        made.export.close()
        made.cache.close()


def _serve(host: str) -> None:
    with side(host, 0) as here:
        print(here.description, flush=True)
        sys.stdin.readline()
        print(int(here.memory.sum(dtype=np.uint64)), flush=True)


def _put(host: str, description: str, num_puts: int) -> None:
    far = {name: bytes.fromhex(text) for name, text in json.loads(description).items()}
    with (
        side(host, 1) as here,
        here.transport.link(here.cache, [far["region"]], far["board"]) as link,
    ):
        address = int(link.region_addresses[0])
        copy = CopyPlan.contiguous(here.memory.ctypes.data, address, NUM_BYTES)
        print("started", flush=True)
        for _ in range(num_puts):
            path = link.post(copy, Op.PUT).actual_path
        print(path, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(sys.argv[2])
    else:
        _put(sys.argv[2], sys.argv[3], int(sys.argv[4]))
