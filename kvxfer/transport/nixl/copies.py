"""What fills and empties slots: threads, or the paged copy on a GPU.

Both have the same face: a copy is started for a slot, and is over once :meth:`Copies.is_done` says
so, at once for threads.
"""

import time
from abc import ABC, abstractmethod

from kvxfer import _core
from kvxfer.errors import TransferTimeout
from kvxfer.layout import CopyPlan
from kvxfer.memory import create_segment
from kvxfer.transport.device_copy import default_num_sms
from kvxfer.transport.host_copy import plan_tables

_DRAIN_S = 10.0
_SLICE_S = 0.2


class Copies(ABC):
    """Copies between pages and the slots of one connection, one at a time a slot."""

    @abstractmethod
    def start(self, slot: int, plan: CopyPlan, *, num_sms: int = 0) -> None:
        """Begin a copy into a slot, or out of it; ``num_sms`` 0 = the measured best of a GPU.

        Raises:
            InvalidUsage: an index beyond the plan's tables, or more SMs than there are.
        """

    @abstractmethod
    def is_done(self, slot: int) -> bool:
        """Whether the copy of a slot is over and its bytes are visible to all.

        Raises:
            CudaError: the GPU failed.
        """

    @abstractmethod
    def drain(self) -> None:
        """Wait until all copies are over: no page and no slot is read or written any more.

        Raises:
            CudaError: the GPU failed.
            TransferTimeout: they did not end in time.
        """

    def rest(self) -> None:
        """:meth:`drain`, and give back what idling costs; the next copy takes it again."""
        self.drain()

    def close(self) -> None:
        """:meth:`drain`, and give threads or stream back; as often as one likes."""
        self.drain()


class HostCopies(Copies):
    """Copies by threads, each over when :meth:`start` returns."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool: _core.WorkerPool | None = None

    def start(self, slot: int, plan: CopyPlan, *, num_sms: int = 0) -> None:
        """Copy."""
        if self._pool is None:
            self._pool = _core.WorkerPool(self._num_threads)
        _core.paged_copy_host(self._pool, plan_tables(plan), False)

    def is_done(self, slot: int) -> bool:
        """True."""
        return True

    def drain(self) -> None:
        """None is under way."""

    def rest(self) -> None:
        """End the threads."""
        self._pool = None

    close = rest


class DeviceCopies(Copies):
    """Copies by kernels of one GPU, in order, on a stream of their own."""

    def __init__(self, device: int, num_slots: int) -> None:
        flags = create_segment(num_slots * _core.CompletionBoard.SLOT_BYTES)
        self._posted = [0] * num_slots
        self._copier: _core.DeviceCopier | None = _core.DeviceCopier(
            device, flags.address, num_slots
        )
        self._flags = flags  # goes after the copier, which writes there

    def start(self, slot: int, plan: CopyPlan, *, num_sms: int = 0) -> None:
        """Queue a kernel."""
        assert self._copier is not None
        budget = num_sms or default_num_sms(plan)
        self._copier.post(plan_tables(plan), slot, self._posted[slot] + 1, num_sms=budget)
        self._posted[slot] += 1

    def is_done(self, slot: int) -> bool:
        """Whether its flag is up."""
        assert self._copier is not None
        return self._copier.wait(slot, self._posted[slot], 0.0)

    def drain(self) -> None:
        """Wait for the kernels."""
        deadline = time.monotonic() + _DRAIN_S
        for slot, sequence in enumerate(self._posted if self._copier is not None else ()):
            self._wait(slot, sequence, deadline)

    def close(self) -> None:
        """Wait for the kernels and give the stream back."""
        super().close()
        self._copier = None

    def _wait(self, slot: int, sequence: int, deadline: float) -> None:
        assert self._copier is not None
        # In slices, because Python delivers signals (Ctrl-C) only between native calls.
        while not self._copier.wait(
            slot, sequence, min(_SLICE_S, max(deadline - time.monotonic(), 0.0))
        ):
            if time.monotonic() >= deadline:
                raise TransferTimeout(f"the kernels of a transfer did not end within {_DRAIN_S} s")
