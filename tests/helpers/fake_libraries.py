"""NIXL and Mooncake as far as the sweep uses them, in one process."""

import ctypes
from typing import Any, ClassVar

import numpy as np


def copy_pages(dst: Any, src: Any, sizes: Any) -> None:
    for one in zip(list(dst), list(src), list(sizes), strict=True):
        ctypes.memmove(*map(int, one))


class FakeNixl:
    """The module ``nixl._api``."""

    asked: ClassVar[list[tuple[bool, dict[str, str]]]] = []
    end = "DONE"

    def nixl_agent_config(self, *, enable_prog_thread: bool, backends: list[str]) -> bool:
        assert backends == []
        return enable_prog_thread

    def nixl_agent(self, name: str, config: bool) -> "FakeAgent":
        return FakeAgent(name, config)


class FakeAgent:
    def __init__(self, name: str, has_progress_thread: bool) -> None:
        self.name, self.has_progress_thread = name, has_progress_thread
        self.ranges: list[tuple[int, int]] = []

    def create_backend(self, kind: str, params: dict[str, str]) -> None:
        assert kind == "UCX"
        FakeNixl.asked.append((self.has_progress_thread, params))

    def register_memory(self, ranges: list[tuple[int, int, int, str]], memory: str) -> None:
        assert memory == "DRAM"
        self.ranges += [(address, address + size) for address, size, _, _ in ranges]

    def get_agent_metadata(self) -> bytes:
        return repr(self.ranges).encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        assert metadata
        return "far"

    def prep_xfer_dlist(self, agent: str, rows: Any, memory: str) -> Any:
        assert agent in ("NIXL_INIT_AGENT", "far")
        assert (rows.dtype, rows.shape[1], memory) == (np.uint64, 3, "DRAM")
        return rows

    def make_prepped_xfer(self, op: str, local: Any, own: Any, remote: Any, other: Any) -> Any:
        near, far = local[own], remote[other]
        src, dst = (near, far) if op == "WRITE" else (far, near)
        return dst[:, 0], src[:, 0], src[:, 1]

    def transfer(self, handle: Any) -> str:
        copy_pages(*handle)
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        return FakeNixl.end

    def release_xfer_handle(self, handle: Any) -> None:
        pass

    def release_dlist_handle(self, handle: Any) -> None:
        pass


class FakeMooncake:
    """The module ``mooncake.engine``."""

    def TransferEngine(self) -> "FakeEngine":
        return FakeEngine()


class FakeEngine:
    status = 0

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        assert (host, metadata, protocol, device) == ("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        return 0

    def register_memory(self, address: int, num_bytes: int) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 12345

    def batch_transfer_sync_write(
        self, target: str, near: list[int], far: list[int], sizes: list[int]
    ) -> int:
        assert target == "127.0.0.1:12345"
        copy_pages(far, near, sizes)
        return self.status

    def batch_transfer_sync_read(
        self, target: str, near: list[int], far: list[int], sizes: list[int]
    ) -> int:
        return self.batch_transfer_sync_write(target, far, near, sizes)
