"""Both sides of a transfer: the local pool, the far agent's pool and the link between them."""

import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer import _core
from kvxfer.closing import Closing
from kvxfer.errors import PeerLost, VerificationError
from kvxfer.layout import CopyPlan, KVLayout
from kvxfer.session import Endpoint, Peer
from kvxfer.session.layouts import layout_spec
from kvxfer.sweep import messages
from kvxfer.sweep.agent import SweepAgent
from kvxfer.sweep.host_memory import require_host_memory
from kvxfer.sweep.patterned_cache import PatternedCache, unlisted
from kvxfer.transport import Op

TIMEOUT_S = 60.0
_WAKE_TRANSFERS = 3
# A page of this many bytes for each thread is cut into work for all of them.
_WAKE_BYTES = 256
_Found: TypeAlias = messages.Checked | _core.PatternMismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RigSpec:
    """What to connect.

    Attributes:
        layout: one rank's cache, the same on both sides.
        num_blocks: blocks of each side's pool.
        transport: transport name.
        memory: the peer's memory: ``shared``, ``private`` or ``device``. This side's is private, or
            on a device too.
        op: put (this process is the source) or get (it is the destination).
        num_threads: threads of host copies, fills and checks, on either side.
        devices: CUDA devices of source and destination; ignored for host memory.
    """

    layout: KVLayout
    num_blocks: int
    transport: str
    memory: str
    op: Op
    num_threads: int
    devices: tuple[int, int]


@dataclass(frozen=True, slots=True)
class BlockTables:
    """The blocks of the request on either side, int64 ``[num_blocks]``."""

    source: NDArray[np.int64]
    destination: NDArray[np.int64]


class Rig(Closing):
    """A connected pair. A context manager.

    The side that runs the copy is this process: the source for put, the destination for get.

    Attributes:
        spec: what was connected.
        peer: the link to the far side.
        local: this side's pool.
        wake_plan: the short copy that wakes the path.
    """

    def __init__(self, spec: RigSpec, agent: SweepAgent) -> None:
        """Allocate both pools, the far one through ``agent``, and connect them.

        Raises:
            NotAvailable: the transport does not work here, or memory is short.
            KvxferError: what else setting up raises on either side.
        """
        self.spec = spec
        self._agent = agent
        on_device = spec.memory == "device"
        put = spec.op is Op.PUT
        near, far = (spec.devices if put else spec.devices[::-1]) if on_device else (-1, -1)
        prepare = messages.Prepare(
            layout=layout_spec(spec.layout),
            num_blocks=spec.num_blocks,
            memory=spec.memory,
            device=far,
            transport=spec.transport,
            num_threads=spec.num_threads,
        )
        if not on_device:  # both sides are on this host
            require_host_memory(2 * spec.num_blocks * spec.layout.block_bytes)
        with ExitStack() as stack:
            stack.callback(self._release)
            prepared = agent.call(prepare)
            self.local = PatternedCache(
                spec.layout,
                spec.num_blocks,
                memory="device" if on_device else "private",
                device=near,
                num_threads=spec.num_threads,
            )
            stack.callback(self.local.close)
            endpoint = stack.enter_context(
                Endpoint(self.local.cache, transport=spec.transport, num_threads=spec.num_threads)
            )
            self.peer: Peer = stack.enter_context(endpoint.connect(prepared.addresses))
            self.wake_plan = self._plan_wake(near)
            self._stack = stack.pop_all()

    def wake(self, num_bytes: int | None = None) -> None:
        """Short copies, so that a round times threads and a GPU in use, not ones that slept.

        A put writes bytes that are of no pattern over the start of the destination's pool, at most
        ``num_bytes`` of them; a get reads there and writes to memory of its own.
        """
        plan = self.wake_plan
        if num_bytes is not None and num_bytes < plan.page_bytes:
            plan = replace(plan, page_bytes=num_bytes)
        for _ in range(_WAKE_TRANSFERS):
            self.peer.link.post(plan, self.spec.op).wait(TIMEOUT_S)

    def limit_copy(self, num_bytes: int) -> float:
        """Time one range from the start of the source's pool to that of the destination's.

        By the fastest way that the path has. Returns seconds, from posting the ready plan until
        the data is visible to the receiver, as for a request.
        """
        local, remote = (
            view.plane_addresses[:1] for view in (self.local.cache.view, self.peer.view)
        )
        plan = self._one_range(local, remote, num_bytes)
        link = self.peer.link
        tuning = link.limit_tuning()
        self.wake(num_bytes)
        start = time.perf_counter_ns()
        link.post(plan, self.spec.op, tuning=tuning).wait(TIMEOUT_S)
        return (time.perf_counter_ns() - start) / 1e9

    def fill_source_prefix(self, seed: int, num_bytes: int) -> None:
        """Write the pattern of ``seed`` where :meth:`limit_copy` reads, whole pages of it."""
        if self.spec.op is Op.PUT:
            self.local.fill_prefix(seed, num_bytes)
        else:
            self._agent.call(messages.FillPrefix(seed=seed, num_bytes=num_bytes))

    def fill_source(self, seed: int, block_ids: NDArray[np.int64] | None = None) -> None:
        """Write the pattern of ``seed`` on the source; None = all blocks."""
        if self.spec.op is Op.PUT:
            self.local.fill(seed, block_ids)
        elif block_ids is None or block_ids.size:
            ids = [] if block_ids is None else block_ids.tolist()
            self._agent.call(messages.Fill(seed=seed, block_ids=ids))

    def fill_destination(self, seed: int) -> None:
        """Overwrite the whole destination pool."""
        if self.spec.op is Op.PUT:
            self._agent.call(messages.Fill(seed=seed))
        else:
            self.local.fill(seed)

    def require_delivered(self, seed: int, tables: BlockTables) -> None:
        """Check every byte of the request on the destination, by the destination.

        Raises:
            VerificationError: a byte differs; says how many words, and where the first is.
        """
        self._require_equal(seed, tables.destination, tables.source, "the request")

    def require_untouched(self, seed: int, tables: BlockTables) -> None:
        """Check that all blocks of the destination outside the request still hold ``seed``.

        Raises:
            VerificationError: a byte was overwritten.
        """
        others = unlisted(tables.destination, self.spec.num_blocks)
        self._require_equal(seed, others, others, "blocks outside the request")

    def require_prefix(self, seed: int, num_bytes: int) -> None:
        """Check the whole pages among ``num_bytes`` of a contiguous copy on the destination.

        Raises:
            VerificationError: a byte differs.
        """
        if self.spec.op is Op.PUT:
            found = self._agent.call(messages.CheckPrefix(seed=seed, num_bytes=num_bytes))
        else:
            found = self.local.check_prefix(seed, num_bytes)
        num_pages = num_bytes // self.spec.layout.page_bytes
        self._judge(found, "the contiguous copy", num_pages)

    def start_compute(self, kind: str) -> None:
        """Start a compute load on the far side's GPU."""
        self._agent.call(messages.Compute(kind=kind, running=True))

    def stop_compute(self) -> float:
        """Stop it; median microseconds of its operation."""
        stopped: messages.Computed = self._agent.call(messages.Compute(kind="", running=False))
        return stopped.operation_us

    def close(self) -> None:
        """Disconnect and free both pools; may be called more than once."""
        self._stack.close()

    def _one_range(
        self, local: NDArray[np.uint64], remote: NDArray[np.uint64], num_bytes: int
    ) -> CopyPlan:
        put = self.spec.op is Op.PUT
        zero = np.zeros(1, np.uint64)
        return CopyPlan(
            local if put else remote,
            remote if put else local,
            src_offsets=zero,
            dst_offsets=zero,
            page_bytes=num_bytes,
        )

    def _plan_wake(self, device: int) -> CopyPlan:
        pool_bytes = self.spec.num_blocks * self.spec.layout.block_bytes
        num_bytes = min(_WAKE_BYTES * self.spec.num_threads, pool_bytes)
        if device < 0:
            host = np.zeros(num_bytes, np.uint8)
            self._scratch: object = host
            address = host.ctypes.data
        else:
            buffer = _core.DeviceBuffer(device, num_bytes)
            self._scratch = buffer
            address = buffer.address
        local = np.array([address], np.uint64)
        return self._one_range(local, self.peer.view.plane_addresses[:1], num_bytes)

    def _release(self) -> None:
        with suppress(PeerLost):  # who is gone holds nothing
            self._agent.call(messages.Release())

    def _require_equal(
        self, seed: int, block_ids: NDArray[np.int64], source_ids: NDArray[np.int64], what: str
    ) -> None:
        if self.spec.op is Op.PUT:
            found = self._agent.call(
                messages.Check(
                    seed=seed, block_ids=block_ids.tolist(), source_ids=source_ids.tolist()
                )
            )
        else:
            found = self.local.check(seed, block_ids, source_ids)
        num_pages = block_ids.size * self.spec.layout.num_planes
        self._judge(found, what, num_pages, block_ids)

    def _judge(
        self,
        found: _Found,
        what: str,
        num_pages: int,
        block_ids: NDArray[np.int64] | None = None,
    ) -> None:
        wrong = found.num_wrong_words
        if wrong == 0:
            return
        page = found.first_page
        where = f"page {page}"
        if block_ids is not None:
            plane, index = divmod(page, block_ids.size)
            where = f"plane {plane}, block {block_ids[index]}"
        num_words = num_pages * self.spec.layout.page_bytes // 8
        raise VerificationError(
            f"{what}: {wrong} of {num_words} 8-byte words are wrong at the destination, the first "
            f"in {where}"
        )
