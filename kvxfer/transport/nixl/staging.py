"""Memory that rows pass through."""

import numpy as np

from kvxfer.transport.nixl.agent import Agent, Range


class Staging:
    """Slots of one connection on one side, registered for as long as they are used."""

    def __init__(self, agent: Agent, num_slots: int, slot_bytes: int) -> None:
        self._agent = agent
        self.bytes = np.empty(num_slots * slot_bytes, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self.memory: Range = (self.address, self.bytes.size)
        agent.register(self.memory)

    def slot_address(self, slot: int) -> int:
        """Where a slot begins."""
        return self.address + slot * self.slot_bytes

    def close(self) -> None:
        """End the registration."""
        self._agent.deregister(self.memory)
