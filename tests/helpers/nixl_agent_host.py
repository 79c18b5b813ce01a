"""A NIXL agent with memory, driven by name: in this process, or as a child over JSON lines."""

import base64
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from peer_host import serve

from kvxfer import shared_empty
from kvxfer.connectors.nixl_agent import AcceleratedAgent
from kvxfer.transport.nixl.api import load_api

OWN = "NIXL_INIT_AGENT"
DEADLINE_S = 25.0  # within that of a call


def pages_of(round_number: int, side: str, num_pages: int, page_bytes: int) -> Any:
    """Pages, uint64 ``[num_pages, words]``: each word names round, side, page and place."""
    first = (round_number << 48) | (ord(side[0]) << 40)
    count = num_pages * page_bytes // 8
    return (np.arange(count, dtype=np.uint64) + np.uint64(first)).reshape(num_pages, -1)


class AgentHost:
    """One agent and its pages."""

    def __init__(self) -> None:
        self.agent: Any = None
        self.pages: Any = None
        self.registered: Any = None
        self.side = ""

    def open(
        self,
        side: str,
        num_pages: int,
        page_bytes: int,
        accelerated: bool,
        shared: bool = False,
        progress: bool = True,
    ) -> str:
        """Start it, with pages of round 0; returns its name.

        NIXL's progress thread spins: a side that others only copy from and to goes without.
        """
        self.close()
        allocate = shared_empty if shared else np.zeros
        self.pages = allocate((num_pages, page_bytes // 8), np.uint64)
        self.side = side
        self.fill(0)
        kind = AcceleratedAgent if accelerated else load_api().nixl_agent
        config = load_api().nixl_agent_config(progress, capture_telemetry=True)
        self.agent = kind(side, config)
        self.register()
        return side

    def register(self) -> None:
        """Register the pages."""
        self.registered = self.agent.register_memory([(*self.range, 0, "")], "DRAM")

    def deregister(self) -> None:
        """Give the registration back."""
        self.agent.deregister_memory(self.registered)

    @property
    def range(self) -> tuple[int, int]:
        """Address and bytes of all pages."""
        return self.pages.ctypes.data, self.pages.nbytes

    def address(self) -> int:
        """Where the pages begin."""
        return int(self.pages.ctypes.data)

    def fill(self, round_number: int) -> None:
        """Write a round's content."""
        self.pages[:] = self.content(round_number, self.side)

    def content(self, round_number: int, side: str) -> Any:
        """What the pages of a side of this size hold in a round."""
        num_pages, words = self.pages.shape
        return pages_of(round_number, side, num_pages, words * 8)

    def metadata(self) -> str:
        """The agent's, in base 64."""
        return base64.b64encode(self.agent.get_agent_metadata()).decode()

    def know(self, metadata: str) -> str:
        """Load another's."""
        found = self.agent.add_remote_agent(base64.b64decode(metadata))
        return found.decode() if isinstance(found, bytes) else found

    def num_wrong(self, pages_seed: int, round_number: int, source_side: str) -> int:
        """Pages that are not as `permutation` and a transfer of all of them leave them."""
        source, destination = permutations(pages_seed, len(self.pages))
        wanted = self.content(round_number, source_side)[source]
        return int((self.pages[destination] != wanted).any(axis=1).sum())

    def notifs(self, timeout_s: float = DEADLINE_S) -> list[tuple[str, str]]:
        """The next notifications to come."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            found = self.agent.get_new_notifs()
            if found:
                return [(name, data.decode()) for name, all_ in found.items() for data in all_]
            time.sleep(0.001)
        return []

    def expect(
        self, *, pages_seed: int, round_number: int, source_side: str, announce: Callable[[], None]
    ) -> dict[str, Any]:
        """Wait for a notification and look at once what has arrived."""
        announce()
        end = time.monotonic() + DEADLINE_S
        found: Any = {}
        while not found and time.monotonic() < end:
            found = self.agent.get_new_notifs()
        num_wrong = self.num_wrong(pages_seed, round_number, source_side)
        return {"notified": bool(found), "num_wrong": num_wrong}

    def close(self) -> None:
        """End the agent."""
        self.agent = None


def permutations(seed: int, count: int) -> tuple[Any, Any]:
    """Which pages go where: two orders of all of them, int64."""
    rng = np.random.default_rng(seed)
    return rng.permutation(count), rng.permutation(count)


if __name__ == "__main__":
    sys.setswitchinterval(0.001)
    serve(AgentHost())
