"""Both sides of a transfer: the local pool, the far agent's pool and the link between them."""

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.closing import Closing
from kvxfer.errors import ControlTimeout, PeerLost
from kvxfer.layout import CopyPlan, KVLayout, TPLayout
from kvxfer.session import Endpoint, Peer
from kvxfer.session.layouts import layout_spec, rank_spec
from kvxfer.sweep import messages
from kvxfer.sweep.agent import SweepAgent
from kvxfer.sweep.binding import LOOPBACK, Binding
from kvxfer.sweep.host_memory import require_host_memory
from kvxfer.sweep.messages import ByteRange, Checked
from kvxfer.sweep.patterned_cache import PatternedCache
from kvxfer.sweep.token_runs import TokenRuns
from kvxfer.sweep.wake import WAKE_BYTES, Scratch, run_wake
from kvxfer.transport import Op, tuned
from kvxfer.tuning import Profile

TIMEOUT_S = 60.0
_log = logging.getLogger(__name__)


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
        num_threads: threads of fills and checks, on either side.
        devices: CUDA devices of source and destination; ignored for host memory.
        shares_host: whether both pools are on this host.
        copy_threads: threads of host copies, on either side; None = the measured best.
        tuning: the profile that both sides go by; None = each by its own.
    """

    layout: KVLayout
    num_blocks: int
    transport: str
    memory: str
    op: Op
    num_threads: int
    devices: tuple[int, int]
    shares_host: bool = True
    copy_threads: int | None = None
    tuning: Profile | None = None


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

    def __init__(self, spec: RigSpec, agent: SweepAgent, binding: Binding = LOOPBACK) -> None:
        """Allocate both pools, the far one through ``agent``, and connect them by ``binding``.

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
            rank=rank_spec(TPLayout()),
            num_blocks=spec.num_blocks,
            memory=spec.memory,
            device=far,
            transport=spec.transport,
            num_threads=spec.num_threads,
            copy_threads=spec.copy_threads,
            tuning=spec.tuning,
        )
        if not on_device:
            num_pools = 2 if spec.shares_host else 1
            require_host_memory(num_pools * spec.num_blocks * spec.layout.block_bytes)
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
            with tuned.using(spec.tuning):
                endpoint = stack.enter_context(
                    Endpoint(
                        self.local.cache,
                        transport=spec.transport,
                        num_threads=spec.copy_threads,
                        bind_host=binding.bind_host,
                        key=binding.key,
                        insecure=binding.insecure,
                    )
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
        if num_bytes is not None and num_bytes < plan.total_bytes:
            plan = CopyPlan.contiguous(int(plan.src_planes[0]), int(plan.dst_planes[0]), num_bytes)
        run_wake(self.peer.link, plan, self.spec.op, TIMEOUT_S)

    def limit_copy(self, num_bytes: int) -> float:
        """Time one range from the start of the source's pool to that of the destination's.

        By the fastest way that the path has. Returns seconds, from posting the ready plan until
        the data is visible to the receiver, as for a request.
        """
        plan = self._one_range(self.local.start_address, num_bytes)
        link = self.peer.link
        tuning = link.limit_tuning()
        self.wake(num_bytes)
        start = time.perf_counter_ns()
        link.post(plan, self.spec.op, tuning=tuning).wait(TIMEOUT_S)
        return (time.perf_counter_ns() - start) / 1e9

    def fill_source_prefix(self, seed: int, num_bytes: int) -> None:
        """Write the pattern of ``seed`` where :meth:`limit_copy` reads."""
        ranges = [ByteRange(0, num_bytes)]
        if self.spec.op is Op.PUT:
            self.local.fill_ranges(seed, ranges)
        else:
            self._agent.call(messages.FillRanges(seed=seed, ranges=ranges))

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
        block_size = self.spec.layout.block_size
        count = max(tables.destination.size, tables.source.size) * block_size
        if self.spec.op is Op.GET:
            runs = TokenRuns.request(
                tables.destination,
                tables.source,
                block_size=block_size,
                source_block_size=block_size,
                count=count,
            )
            found = self.local.check(seed, runs)
        else:
            check = messages.Check(
                seed=seed,
                num_tokens=count,
                block_ids=tables.destination.tolist(),
                source_ids=tables.source.tolist(),
                source_block_size=block_size,
                converted_from="none",
            )
            found = self._agent.call(check)
        found.require_none_wrong("the request")

    def require_untouched(self, seed: int, tables: BlockTables) -> None:
        """Check that all blocks of the destination outside the request still hold ``seed``.

        Raises:
            VerificationError: a byte was overwritten.
        """
        block_size = self.spec.layout.block_size
        ids = tables.destination
        found: Checked
        if self.spec.op is Op.GET:
            runs = TokenRuns.outside_request(
                ids, block_size=block_size, num_blocks=self.spec.num_blocks, count=0
            )
            found = self.local.check(seed, runs)
        else:
            check = messages.CheckOutside(seed=seed, num_tokens=0, block_ids=ids.tolist())
            found = self._agent.call(check)
        found.require_none_wrong("blocks outside the request")

    def require_prefix(self, seed: int, num_bytes: int) -> None:
        """Check the bytes of a contiguous copy on the destination.

        Raises:
            VerificationError: a byte differs.
        """
        ranges = [ByteRange(0, num_bytes)]
        if self.spec.op is Op.GET:
            found = self.local.check_ranges(seed, ranges)
        else:
            found = self._agent.call(messages.CheckRanges(seed=seed, ranges=ranges))
        found.require_none_wrong("the contiguous copy")

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

    def _one_range(self, local_address: int, num_bytes: int) -> CopyPlan:
        """Between here and the start of the peer's pool."""
        addresses = (local_address, int(self.peer.view.addresses[0, 0]))
        src, dst = addresses if self.spec.op is Op.PUT else addresses[::-1]
        return CopyPlan.contiguous(src, dst, num_bytes)

    def _plan_wake(self, device: int) -> CopyPlan:
        pool_bytes = self.spec.num_blocks * self.spec.layout.block_bytes
        num_bytes = min(WAKE_BYTES * self.spec.num_threads, pool_bytes)
        self._scratch = Scratch(device, num_bytes)
        return self._one_range(self._scratch.address, num_bytes)

    def _release(self) -> None:
        try:
            self._agent.call(messages.Release())
        except (PeerLost, ControlTimeout) as error:
            # Who is gone holds nothing; who is slow frees it before it prepares the next. An error
            # here would be told in place of what has ended the case.
            _log.info("releasing the far side: %s", error)
