"""A process with one channel as LMCache's P2P makes it, which reads and writes in both ways."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import lmcache_host
import torch
from lmcache.v1 import transfer_channel
from lmcache.v1.transfer_channel.transfer_utils import P2PInitSideMsg

from kvxfer.connectors.lmcache import install
from kvxfer.connectors.lmcache.options import Options
from kvxfer.connectors.lmcache.setting import Setting, constructing

PAGE_BYTES, NUM_PAGES = 1 << 20, 8


class P2PHost:
    """A pool of pages, each of one byte's content, and its channel."""

    def __init__(self) -> None:
        install()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def open(self, *, url: str, seed: int) -> None:
        raw = torch.zeros((NUM_PAGES + 1) * PAGE_BYTES, dtype=torch.uint8)
        first = -raw.data_ptr() % 4096
        self.pages = raw[first : first + NUM_PAGES * PAGE_BYTES].view(NUM_PAGES, PAGE_BYTES)
        self.pages[:] = torch.arange(seed, seed + NUM_PAGES, dtype=torch.uint8)[:, None]
        with constructing(Setting(options=Options(peers="kvxfer", connect_timeout_s=3.0))):
            self.channel = transfer_channel.CreateTransferChannel(
                channel_type="kvxfer", async_mode=True, role="both", tp_rank=0,
                buffer_ptr=self.pages.data_ptr(), buffer_size=self.pages.numel(),
                align_bytes=PAGE_BYTES, peer_init_url=url, peer_lookup_url=f"lookup of {url}",
                backends=None, event_loop=self.loop, device="cpu",
            )  # fmt: skip
        self.url = url

    def meet(self, *, url: str) -> str:
        """Meet a peer; returns what it says of itself."""
        answer = self._run(
            self.channel.async_lazy_init_peer_connection(self.url, url, url, P2PInitSideMsg())
        )
        return str(answer.peer_lookup_url)

    def knows(self, *, url: str) -> bool:
        return bool(self.channel.remote_xfer_handler_exists(url))

    def write(self, *, url: str, near: list[int], far: list[int]) -> int:
        spec = {"receiver_id": url, "remote_indexes": far}
        return int(self._run(self.channel.async_batched_write(_objects(near), spec)))

    def read(self, *, url: str, near: list[int], far: list[int]) -> int:
        spec = {"sender_id": url, "remote_indexes": far}
        return int(self._run(self.channel.async_batched_read(_objects(near), spec)))

    def content(self) -> list[int]:
        """The byte that each page is full of; -1 of one that is mixed."""
        return [int(one[0]) if bool((one == one[0]).all()) else -1 for one in self.pages]

    def close(self) -> None:
        self.channel.close()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20.0)


def _objects(pages: list[int]) -> list[Any]:
    meta = [SimpleNamespace(address=page, get_size=lambda: PAGE_BYTES) for page in pages]
    return [SimpleNamespace(meta=one) for one in meta]


if __name__ == "__main__":
    lmcache_host.run(P2PHost())
