"""All libraries that pages can be moved by, by their names."""

from kvxfer.errors import InvalidUsage
from kvxfer.sweep.peers.library import PeerLibrary, Row
from kvxfer.sweep.peers.memcpy import Memcpy
from kvxfer.sweep.peers.memcpy_batch import MemcpyBatch
from kvxfer.sweep.peers.mooncake import Mooncake
from kvxfer.sweep.peers.nixl import Nixl
from kvxfer.sweep.peers.process_vm import ProcessVm

PEERS: dict[str, PeerLibrary] = {
    one.name: one for one in (Nixl(), Mooncake(), Memcpy(), MemcpyBatch(), ProcessVm())
}


def row_of(name: str) -> tuple[PeerLibrary, Row]:
    """The library of a row of the table, and the row.

    Raises:
        InvalidUsage: no library has such a row.
    """
    for library in PEERS.values():
        for row in library.rows:
            if row.name == name:
                return library, row
    raise InvalidUsage(f"peer {name!r}; use {', '.join(PEERS)}")
