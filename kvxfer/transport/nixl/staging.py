"""Memory that rows pass through, and what fills and empties it."""

from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from kvxfer import _core
from kvxfer.transport.nixl.agent import Agent
from kvxfer.transport.nixl.copies import Copies, DeviceCopies, HostCopies
from kvxfer.transport.nixl.memory import HOST_DEVICE, Range
from kvxfer.tuning import Section, Slots


class Place(str, Enum):
    """Where the slots of a side lie."""

    HOST = "host"
    """Host memory, which threads copy."""
    PINNED = "pinned"
    """Host memory, which a GPU copies over its bus."""
    DEVICE = "device"
    """Memory of the GPU that copies."""


class SlotShape(NamedTuple):
    """How many slots a connection has, and of how many bytes each."""

    num_slots: int
    slot_bytes: int

    def as_slots(self, place: Place) -> Slots:
        """As a profile has it."""
        return Slots(place=place.value, num_slots=self.num_slots, slot_bytes=self.slot_bytes)


# Of threads: measured. A GPU takes a slot of 32 MiB in about 0.1 ms, which is what a piece costs
# the CPUs of both sides; a bus and a network are slower.
SHAPES = {
    Place.HOST: SlotShape(4, 2 << 20),
    Place.PINNED: SlotShape(4, 8 << 20),
    Place.DEVICE: SlotShape(4, 32 << 20),
}


def shape_of(place: Place, section: Section) -> SlotShape:
    """By the profile, or the default."""
    slots = section.slots_in(place.value)
    return SHAPES[place] if slots is None else SlotShape(slots.num_slots, slots.slot_bytes)


def place_of(device: int, *, in_device: bool) -> Place:
    """Where a side whose pages are on ``device`` has its slots."""
    if device < 0:
        return Place.HOST
    return Place.DEVICE if in_device else Place.PINNED


class Staging:
    """Slots of one connection on one side, registered for as long as they are used.

    Attributes:
        memory: all of them.
        copies: what copies between them and pages.
    """

    def __init__(
        self, agent: Agent, place: Place, shape: SlotShape, *, device: int, num_threads: int
    ) -> None:
        """Allocate and register them.

        Raises:
            CudaError, RegistrationError: there is no such memory left.
        """
        self._agent, self._place = agent, place
        self.num_slots, self.slot_bytes = shape
        num_bytes = self.num_slots * self.slot_bytes
        self.copies: Copies
        if place is Place.HOST:
            self.copies = HostCopies(num_threads)
        else:
            self.copies = DeviceCopies(device, self.num_slots)
        self._owner, self.memory = _allocate(place, num_bytes, device)
        agent.register(self.memory)

    def fits(self, place: Place, shape: SlotShape) -> bool:
        """Whether it is what a connection would be given."""
        return (self._place, self.num_slots, self.slot_bytes) == (place, *shape)

    def slot_address(self, slot: int) -> int:
        """Where a slot begins."""
        return self.memory.address + slot * self.slot_bytes

    def close(self) -> None:
        """Wait for the copies and end the registration.

        Raises:
            TransferTimeout: copies did not end.
        """
        self.copies.close()
        self._agent.deregister(self.memory)
        self._owner = None


def _allocate(place: Place, num_bytes: int, device: int) -> tuple[Any, Range]:
    """Memory, and what keeps it."""
    if place is Place.DEVICE:
        buffer = _core.DeviceBuffer(device, num_bytes)
        return buffer, Range(buffer.address, num_bytes, device)
    array = np.empty(num_bytes, np.uint8)
    memory = Range(int(array.ctypes.data), num_bytes, HOST_DEVICE)
    if place is Place.HOST:
        return array, memory
    # A tuple lets go of its last item first: the memory outlives its registration.
    return (array, _core.PinnedRange(memory.address, num_bytes)), memory
