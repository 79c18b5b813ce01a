"""A process with an L1 memory on LMCache's registry of transfer channels, or an L2 plug-in."""

import os
import select
import time
from typing import Any

import lmcache_host
import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.transfer_channel.api import TransferChannelAddress
from lmcache.v1.distributed.transfer_channel.factory import create_transfer_channel_context
from lmcache_host import content

from kvxfer.connectors.lmcache.mp import KvxferL2

ALIGN = 4096


class MPHost:
    """One memory, one context, one L2 store."""

    def __init__(self) -> None:
        self.context: Any = None
        self.l2: Any = None

    def open(self, *, num_bytes: int, url: str, seed: int) -> float:
        """Make a memory of a seed's content and serve it; returns the seconds that took."""
        raw = torch.zeros(num_bytes + ALIGN, dtype=torch.uint8)
        first = -raw.data_ptr() % ALIGN
        self.memory = raw[first : first + num_bytes]
        self.memory.copy_(content(num_bytes, seed))
        began = time.monotonic()
        self.context = create_transfer_channel_context(
            "kvxfer", L1MemoryDesc(self.memory.data_ptr(), num_bytes, ALIGN), url, url
        )
        return time.monotonic() - began

    def read(self, *, url: str, near: list[list[int]], far: list[list[int]]) -> list[bool]:
        """Read pieces (offset, size) of a peer; returns which of them came."""
        client = self.context.get_transfer_channel_client(url)
        here = self.context.get_transfer_channel_address([tuple(one) for one in near])
        # A peer's addresses are made by the peer.
        there = [TransferChannelAddress(offset, size) for offset, size in far]
        task = client.submit_read(here, there)
        deadline = time.monotonic() + 20.0
        while not (found := client.query_read_status(task)).is_finished():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return list(found.succeeded_mask)

    def wrong_bytes(self, *, near: list[int], far: list[int], seed: int) -> int:
        """How many bytes of a piece are not those of a seed's memory."""
        offset, size = near
        expected = content(far[0] + size, seed)[far[0] :]
        return int((self.memory[offset : offset + size] != expected).sum())

    def open_l2(self, **params: Any) -> None:
        self.l2 = KvxferL2(params)

    def store(self, *, names: list[int], size: int) -> bool:
        """Store objects of the content of their names."""
        objects = [_object(content(size, name)) for name in names]
        task = self.l2.submit_store_task([_key(name) for name in names], objects)
        self._await(self.l2.get_store_event_fd())
        return bool(self.l2.pop_completed_store_tasks()[task].is_successful())

    def load(self, *, names: list[int], size: int) -> list[str]:
        """Lock, load and unlock; for each object ``absent``, ``wrong`` or ``right``."""
        keys = [_key(name) for name in names]
        objects = [_object(torch.zeros(size, dtype=torch.uint8)) for _ in names]
        task = self.l2.submit_lookup_and_lock_task(keys, {})
        self._await(self.l2.get_lookup_and_lock_event_fd())
        found = self.l2.query_lookup_and_lock_result(task)
        task = self.l2.submit_load_task(keys, objects)
        self._await(self.l2.get_load_event_fd())
        loaded = self.l2.query_load_result(task)
        self.l2.submit_unlock([key for index, key in enumerate(keys) if found.test(index)])
        return [
            "absent" if not (found.test(index) and loaded.test(index))
            else "right" if torch.equal(objects[index].raw_data, content(size, name))
            else "wrong"
            for index, name in enumerate(names)
        ]  # fmt: skip

    def used_bytes(self) -> int:
        return int(self.l2.get_usage().total_bytes_used)

    def close(self) -> None:
        for one in (self.context, self.l2):
            if one is not None:
                one.close()

    def _await(self, fd: int) -> None:
        ready, _, _ = select.select([fd], [], [], 20.0)
        assert ready, "no task has ended"
        os.eventfd_read(fd)


class _Object:
    """As much of LMCache's memory object as a store uses."""

    def __init__(self, data: torch.Tensor) -> None:
        self.raw_data = data

    def get_size(self) -> int:
        return self.raw_data.numel()


def _object(data: torch.Tensor) -> Any:
    return _Object(data)


def _key(name: int) -> ObjectKey:
    return ObjectKey(chunk_hash=name.to_bytes(8, "big"), model_name="m", kv_rank=0)


if __name__ == "__main__":
    lmcache_host.run(MPHost())
