"""A connected sender and receiver for the tests and benchmarks of others.

``kvxfer.pytest_plugin`` hands these out as fixtures. A pair sends nothing by itself and times
nothing; it holds the caches, fills and checks them.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.closing import Closing
from kvxfer.errors import InvalidUsage, PeerLost
from kvxfer.layout import BlockIds, CopyPlan, KVLayout
from kvxfer.memory import MemoryKind
from kvxfer.session import Peer
from kvxfer.sweep.agent import Agent, SweepAgent
from kvxfer.sweep.agent_process import AgentProcess
from kvxfer.sweep.cases import HOST_MEMORY
from kvxfer.sweep.paths import choose_devices
from kvxfer.sweep.rig import TIMEOUT_S, BlockTables, Rig, RigSpec
from kvxfer.transport import TRANSPORTS, Op, Transfer, Tuning, create_transport
from kvxfer.transport.host_copy import default_num_threads

_Ids: TypeAlias = NDArray[np.int64]
_MAX_SEED = (1 << 63) - 1


class Pair(Closing):
    """A source and a destination, each with a cache, connected. A context manager.

    This process runs the copy: it is the source of a put pair and the destination of a get pair.
    The other side is a process of its own (with ``loopback``, this one). Block ids are lists or
    one-dimensional integer arrays of ids of a pool of ``num_blocks``.

    Attributes:
        layout: one rank's cache, the same on both sides.
        num_blocks: blocks of either pool.
        op: put or get.
        peer: the :class:`kvxfer.Peer` that connects this side to the other.
    """

    def __init__(
        self,
        spec: RigSpec,
        agent: SweepAgent,
        *,
        tuning: Tuning | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Use :class:`PairFactory`, or the fixture ``kvxfer_pair``."""
        self._rig = Rig(spec, agent)
        self._tuning = tuning
        self._on_close = on_close
        self._closed = False
        self._seed = 0
        self.layout: KVLayout = spec.layout
        self.num_blocks = spec.num_blocks
        self.op = spec.op
        self.peer: Peer = self._rig.peer

    @property
    def physical_limit_gb_per_s(self) -> float | None:
        """What the hardware can carry one way; None where nothing says so."""
        return self.peer.link.physical_limit_gb_per_s

    def fill(self, seed: int, block_ids: BlockIds | None = None) -> None:
        """Write the pattern of ``seed`` into blocks of the source; None = all.

        Every 8-byte word of the pattern depends on seed, layer, K or V, block, slot and head.
        """
        _require_seed(seed)
        self._rig.fill_source(seed, None if block_ids is None else _as_ids(block_ids))

    def fill_destination(self, seed: int) -> None:
        """Write the pattern of ``seed`` into all blocks of the destination."""
        _require_seed(seed)
        self._rig.fill_destination(seed)

    def put(
        self, src_ids: BlockIds, dst_ids: BlockIds, *, tuning: Tuning | None = None
    ) -> Transfer:
        """Write blocks of the source over those of the destination.

        Returns the completed transfer, once the receiver can see the data.

        Raises:
            InvalidUsage: the pair was made for get, or what :meth:`kvxfer.Peer.put` refuses.
            TransferTimeout: not complete within a minute.
        """
        self._require(Op.PUT)
        return self.move(self.peer.plan(Op.PUT, src_ids, dst_ids), tuning=tuning)

    def get(
        self, src_ids: BlockIds, dst_ids: BlockIds, *, tuning: Tuning | None = None
    ) -> Transfer:
        """Read blocks of the source into those of the destination; else as :meth:`put`."""
        self._require(Op.GET)
        return self.move(self.peer.plan(Op.GET, dst_ids, src_ids), tuning=tuning)

    def transfer(self, src_ids: BlockIds, dst_ids: BlockIds) -> Transfer:
        """:meth:`put` or :meth:`get`, whichever the pair was made for."""
        return (self.put if self.op is Op.PUT else self.get)(src_ids, dst_ids)

    def plan(self, src_ids: BlockIds, dst_ids: BlockIds) -> CopyPlan:
        """What :meth:`transfer` would copy, for :meth:`move`."""
        put = self.op is Op.PUT
        local, remote = (src_ids, dst_ids) if put else (dst_ids, src_ids)
        return self.peer.plan(self.op, local, remote)

    def move(self, plan: CopyPlan, *, tuning: Tuning | None = None) -> Transfer:
        """:meth:`transfer` of a ready plan."""
        transfer = self.peer.link.post(plan, self.op, tuning=tuning or self._tuning)
        transfer.wait(TIMEOUT_S)
        return transfer

    def check(self, seed: int, src_ids: BlockIds, dst_ids: BlockIds) -> None:
        """Have the receiver compare every byte of ``dst_ids`` with what ``src_ids`` were filled by.

        Raises:
            VerificationError: a byte differs; says how many words, and where the first is.
        """
        _require_seed(seed)
        self._rig.require_delivered(seed, _tables(src_ids, dst_ids))

    def check_untouched(self, seed: int, dst_ids: BlockIds) -> None:
        """Have the receiver check that all blocks but ``dst_ids`` still hold ``seed``.

        Raises:
            VerificationError: a byte was overwritten.
        """
        _require_seed(seed)
        self._rig.require_untouched(seed, _tables(dst_ids, dst_ids))

    def prove(self, src_ids: BlockIds, dst_ids: BlockIds) -> None:
        """Move the blocks once and check all of the destination, and the copy of the limit too.

        Both pools are filled anew.

        Raises:
            VerificationError: a block did not arrive, or one outside the request was overwritten.
        """
        old, new = self.next_seed(), self.next_seed()
        self.fill_destination(old)
        self.fill(new)
        self.transfer(src_ids, dst_ids)
        self.check(new, src_ids, dst_ids)
        self.check_untouched(old, dst_ids)
        num_bytes = self.total_bytes(src_ids)
        self.fill_prefix(new, num_bytes)
        self.limit_copy(num_bytes)
        self._rig.require_prefix(new, num_bytes)

    def next_seed(self) -> int:
        """A seed that this pair has not had, from 2**32 on: a test's own are below."""
        self._seed += 1
        return (1 << 32) + self._seed

    def total_bytes(self, block_ids: BlockIds) -> int:
        """Bytes of that many blocks over all planes."""
        return len(block_ids) * self.layout.block_bytes

    def limit_copy(self, num_bytes: int) -> float:
        """Copy one contiguous range as fast as the path allows; returns its seconds.

        The range goes from the start of the source's pool to the start of the destination's, over
        what is there.

        Raises:
            InvalidUsage: more bytes than a pool has, or none.
        """
        pool_bytes = self.num_blocks * self.layout.block_bytes
        if not 0 < num_bytes <= pool_bytes:
            raise InvalidUsage(f"num_bytes is {num_bytes}; use 1 to {pool_bytes}, a pool's size")
        return self._rig.limit_copy(num_bytes)

    def fill_prefix(self, seed: int, num_bytes: int) -> None:
        """Write the pattern of ``seed`` where :meth:`limit_copy` reads."""
        _require_seed(seed)
        self._rig.fill_source_prefix(seed, num_bytes)

    def wake(self) -> None:
        """Run short copies, so that the next transfer finds the path awake.

        A put overwrites the first bytes of the destination's pool.
        """
        self._rig.wake()

    def close(self) -> None:
        """Disconnect and free both caches; may be called more than once."""
        if self._closed:
            return
        self._closed = True
        try:
            self._rig.close()
        finally:
            self._on_close()

    def _require(self, op: Op) -> None:
        if self.op is not op:
            raise InvalidUsage(
                f"{op.value} on a pair made for {self.op.value}; make it with op={op.value!r}"
            )


class PeerProcesses:
    """Far-side processes that pairs use one after the other: starting one takes a second."""

    def __init__(self) -> None:
        self._idle: list[AgentProcess] = []

    def take(self) -> AgentProcess:
        """A running process that no other pair uses.

        Raises:
            NotAvailable: it did not start.
        """
        while self._idle:
            process = self._idle.pop()
            try:
                process.require_alive()
            except PeerLost:
                process.close()
            else:
                return process
        return AgentProcess()

    def give_back(self, process: AgentProcess) -> None:
        """Keep ``process``, whose pair is closed, for the next one."""
        self._idle.append(process)

    def close(self) -> None:
        """End all of them."""
        while self._idle:
            self._idle.pop().close()


class PairFactory:
    """Makes pairs and closes them all at the end. What the fixture ``kvxfer_pair`` gives."""

    def __init__(self, processes: PeerProcesses) -> None:
        self._processes = processes
        self._stack = ExitStack()

    def __call__(
        self,
        *,
        layout: KVLayout,
        num_blocks: int,
        transport: str = "shm",
        memory: str | None = None,
        op: str = "put",
        num_threads: int | None = None,
        devices: tuple[int, int] | None = None,
        tuning: Tuning | None = None,
    ) -> Pair:
        """Allocate two caches of ``layout`` and connect them.

        Args:
            layout: one rank's cache.
            num_blocks: blocks of each side's pool; take about twice the request, as engines have.
            transport: a name of :func:`kvxfer.available_transports`.
            memory: the peer's memory: ``shared`` or ``private`` (host) or ``device``; None =
                ``device`` for nvlink, else ``shared``.
            op: ``put``: this process is the source; ``get``: it is the destination.
            num_threads: threads of host copies; None = the measured best.
            devices: CUDA devices of source and destination, for device memory; None = the first
                two, or the one there is.
            tuning: how copies are run; None = the measured best.

        Raises:
            InvalidUsage: an argument is wrong.
            NotAvailable: the transport does not work here, or memory is short.
        """
        if op not in ("put", "get"):
            raise InvalidUsage(f"op {op!r}; use put or get")
        memory = _checked_memory(transport, memory)
        on_device = memory == "device"
        spec = RigSpec(
            layout=layout,
            num_blocks=num_blocks,
            transport=transport,
            memory=memory,
            op=Op(op),
            num_threads=num_threads or default_num_threads(),
            copy_threads=num_threads,
            devices=choose_devices(devices, transport) if on_device else (-1, -1),
        )
        if transport == "loopback":
            agent = Agent()
            pair = Pair(spec, agent, tuning=tuning, on_close=agent.close)
        else:
            pair = self._with_process(spec, tuning)
        return self._stack.enter_context(pair)

    def close(self) -> None:
        """Close every pair that still is open."""
        self._stack.close()

    def _with_process(self, spec: RigSpec, tuning: Tuning | None) -> Pair:
        process = self._processes.take()

        def give_back() -> None:
            self._processes.give_back(process)

        try:
            return Pair(spec, process, tuning=tuning, on_close=give_back)
        except BaseException:
            give_back()
            raise


def _checked_memory(transport: str, memory: str | None) -> str:
    kind = TRANSPORTS.get(transport)
    if memory is None:
        memory = "shared"
        if kind is not None and MemoryKind.HOST not in kind.capabilities.memory:
            memory = "device"
    if memory not in (*HOST_MEMORY, "device"):
        raise InvalidUsage(f"memory {memory!r}; use {', '.join(HOST_MEMORY)} or device")
    wanted = MemoryKind.DEVICE if memory == "device" else MemoryKind.HOST
    if kind is not None and wanted not in kind.capabilities.memory:
        raise InvalidUsage(f"{memory} memory over {transport}, which does not move that")
    create_transport(transport, memory=wanted)  # says why where it is unknown or not available
    return memory


def _require_seed(seed: int) -> None:
    if not 0 <= seed <= _MAX_SEED:
        raise InvalidUsage(f"seed is {seed}; use 0 to {_MAX_SEED}")


def _as_ids(block_ids: BlockIds) -> _Ids:
    return np.asarray(block_ids, dtype=np.int64)


def _tables(src_ids: BlockIds, dst_ids: BlockIds) -> BlockTables:
    return BlockTables(_as_ids(src_ids), _as_ids(dst_ids))
