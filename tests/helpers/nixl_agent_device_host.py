"""A NIXL agent with pages on a GPU, driven by name: in this process, or as a child."""

import sys
from typing import Any

import cuda_driver
import numpy as np
from nixl_agent_host import AgentHost, permutations
from peer_host import serve

from kvxfer import _core
from kvxfer.connectors.nixl_agent import AcceleratedAgent
from kvxfer.transport.nixl.api import load_api


class DeviceAgentHost(AgentHost):
    """One agent and its pages on one GPU."""

    def open_on(self, side: str, device: int, num_pages: int, page_bytes: int) -> str:
        """Start it, with pages of round 0; returns its name."""
        self.close()
        cuda_driver.make_current(device)  # UCX asks for the GPU's context of the thread
        self.device, self.side = device, side
        self.shape = (num_pages, page_bytes // 8)
        self.buffer = _core.DeviceBuffer(device, num_pages * page_bytes)
        self.fill(0)
        config = load_api().nixl_agent_config(capture_telemetry=True)
        self.agent = AcceleratedAgent(side, config)
        self.registered = self.agent.register_memory([(*self.range, device, "")], "VRAM")
        return side

    @property
    def range(self) -> tuple[int, int]:
        return self.buffer.address, self.buffer.num_bytes

    def address(self) -> int:
        return self.buffer.address

    def fill(self, round_number: int) -> None:
        content = self.content(round_number, self.side).view(np.uint8).ravel()
        cuda_driver.write(self.device, self.buffer.address, content)

    def content(self, round_number: int, side: str) -> Any:
        first = (round_number << 48) | (ord(side[0]) << 40)
        count = self.shape[0] * self.shape[1]
        return (np.arange(count, dtype=np.uint64) + np.uint64(first)).reshape(self.shape)

    def num_wrong(self, pages_seed: int, round_number: int, source_side: str) -> int:
        source, destination = permutations(pages_seed, self.shape[0])
        found = cuda_driver.read(self.device, *self.range).view(np.uint64).reshape(self.shape)
        wanted = self.content(round_number, source_side)[source]
        return int((found[destination] != wanted).any(axis=1).sum())


if __name__ == "__main__":
    sys.setswitchinterval(0.001)
    serve(DeviceAgentHost())
