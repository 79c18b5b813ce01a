"""What a transport is: it exports regions, links to a peer's regions, and runs copy plans.

A transport states what it can do (:class:`Capabilities`) and whether it can do it here
(:class:`Availability`); nothing raises at import. A :class:`Link` has the peer's regions at
addresses that its copies understand, so one plan of plain addresses serves every transport.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvxfer.closing import Closing
from kvxfer.errors import TransferTimeout
from kvxfer.layout import CopyPlan
from kvxfer.memory import KVCache, MemoryKind, Registration
from kvxfer.transport.board import Board
from kvxfer.transport.stream_mark import After
from kvxfer.tuning import Slots

_SLICE_S = 0.2


class Op(str, Enum):
    """One-sided operations, named from the side that runs them."""

    PUT = "put"
    GET = "get"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do anywhere.

    Attributes:
        memory: kinds of memory it moves.
        cross_process: whether the peer may be another process.
        crosses_hosts: whether that may be of another host.
    """

    memory: frozenset[MemoryKind]
    cross_process: bool
    crosses_hosts: bool = False


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a transport works on this machine, and if not, why not."""

    available: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a copy is run. Defaults are the measured best: here, where there is a tuning profile.

    Attributes:
        engine: ``auto`` or one of the transport's own (``memcpy``, ``streaming``, ``bulk``,
            ``load_store``, ``dma``).
        num_sms: GPU thread blocks, one an SM; 0 = the measured best.
    """

    engine: str = "auto"
    num_sms: int = 0


class Transfer(ABC):
    """A posted copy.

    Attributes:
        num_bytes: bytes it moves.
        actual_path: what carries them, read back from what was really used.
        num_sms: SMs of a GPU that it may use; 0 where a CPU or a copy engine carries it.
        sequence: its number on its connection, from 1, for the far side's ``Endpoint.wait``.
    """

    num_bytes: int
    actual_path: str
    sequence: int
    num_sms: int = 0

    @abstractmethod
    def poll(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s``; True once the bytes are visible to the reader.

        Raises:
            TransferFailed: it ended without delivering.
            CudaError: the GPU failed.
        """

    def wait(self, timeout_s: float = 30.0) -> None:
        """Return once the bytes are visible to the reader.

        Raises:
            TransferTimeout: not within ``timeout_s``; the pages may still be written.
        """
        deadline = time.monotonic() + timeout_s
        # In slices, because Python delivers signals (Ctrl-C) only between native calls.
        while not self.poll(min(_SLICE_S, max(deadline - time.monotonic(), 0.0))):
            if time.monotonic() < deadline:
                continue
            raise TransferTimeout(
                f"{self.num_bytes} bytes over {self.actual_path} were not complete after "
                f"{timeout_s} s; keep both sides' pages until they are"
            )


class FinishedTransfer(Transfer):
    """A copy that was complete when ``post`` returned."""

    def __init__(self, num_bytes: int, actual_path: str, sequence: int = 0) -> None:
        self.num_bytes = num_bytes
        self.actual_path = actual_path
        self.sequence = sequence

    def poll(self, timeout_s: float) -> bool:
        """True: the bytes were visible before this object existed."""
        return True


class Export(ABC):
    """A region that peers may link to, for as long as this object lives.

    Attributes:
        metadata: opaque bytes for the peer's :meth:`Transport.link`.
    """

    metadata: bytes

    @abstractmethod
    def close(self) -> None:
        """Withdraw the region; may be called more than once."""


class Link(Closing):
    """A peer's regions, reachable from here. A context manager.

    Attributes:
        region_addresses: uint64 ``[num_regions]``, where copies of this link find each region.
        region_bytes: the length of each.
        path: the path that copies take, as read back from the machine.
        physical_limit_gb_per_s: what the hardware can carry one way; None where nothing says so.
        copies_in_post: whether ``post`` itself copies, and returns once the bytes are there.
        num_threads: CPU threads of this side's copies; 0 where a GPU copies.
        slots: this side's staging slots; None where there are none.
        given_up: what still moves, and may write, of a transfer whose ``post`` has raised: its
            ``poll`` raises once it has ended. None where nothing does.
    """

    region_addresses: NDArray[np.uint64]
    region_bytes: Sequence[int]
    path: str
    physical_limit_gb_per_s: float | None = None
    copies_in_post: ClassVar[bool] = False
    num_threads: int = 0
    slots: Slots | None = None
    given_up: Transfer | None = None

    @abstractmethod
    def post(
        self,
        plan: CopyPlan,
        op: Op,
        *,
        tuning: Tuning | None = None,
        after: After = None,
    ) -> Transfer:
        """Start ``plan``: to the peer's regions for PUT, from them for GET.

        A plan of 0 pages copies nothing and completes like any other: the peer is told.

        Args:
            plan: planes at addresses of this process on one side, within ``region_addresses`` and
                ``region_bytes`` on the other. Its tables may be changed once this returns.
            op: direction.
            tuning: how to run it; None = the measured best.
            after: a CUDA stream whose work that is queued now, or a `StreamMark` that must be
                reached, before the first byte is read; None = no order.

        Raises:
            InvalidUsage: an engine that this transport does not have, or that cannot run this plan
                (the bulk kernel: unaligned; the copy engine: a conversion), or the link is closed.
            PeerLost: the peer is gone.
            TransferTimeout: it copies in ``post`` and has stood still; see ``given_up``.
        """

    def require_open(self) -> None:
        """Check that the peer lives and stands by its cache, as far as this link can tell.

        Raises:
            PeerLost: it ended, or it withdrew the cache.
        """

    @property
    def is_full(self) -> bool:
        """Whether another :meth:`post` would have to wait for earlier copies."""
        return False

    @abstractmethod
    def limit_tuning(self) -> Tuning:
        """How to copy one contiguous range as fast as this path allows: the measured limit."""

    @abstractmethod
    def close(self) -> None:
        """Unmap the peer's regions; may be called more than once.

        Raises:
            TransferTimeout: copies did not end; nothing was unmapped, and closing again waits
                again.
        """


class Transport(ABC):
    """A way to move bytes between two processes.

    Attributes:
        name: its name on the command line and on the wire.
        capabilities: what it can do anywhere.
    """

    name: str
    capabilities: Capabilities

    @classmethod
    @abstractmethod
    def probe(cls) -> Availability:
        """Whether it works here."""

    def serve(self, board: Board, bind_host: str) -> None:  # noqa: B027 - most need nothing
        """Say before the first export where peers complete, and on which address they come.

        Of use to a transport whose peers map no memory of this process: it listens on ``bind_host``
        and stores their completions on ``board`` itself.

        Raises:
            InvalidUsage: ``bind_host`` is no address that the transport can listen on.
        """

    @abstractmethod
    def export(self, registration: Registration) -> Export:
        """Make a registered range linkable.

        Raises:
            RegistrationError: the memory cannot be exported; the message names the remedy.
        """

    @abstractmethod
    def link(self, cache: KVCache, regions: Sequence[bytes], board: bytes) -> Link:
        """Link ``cache`` to the peer's exported ``regions``, completing on the peer's ``board``.

        Raises:
            NotAvailable: the peer cannot be reached this way, and why.
            PeerLost: the peer is gone.
            ProtocolMismatch: the metadata is not what this transport writes.
        """
