"""The paged copy on CPU threads, shared by the transports that move host memory."""

import os
import threading
from abc import abstractmethod

from kvxfer import _core
from kvxfer.errors import InvalidUsage
from kvxfer.layout import CopyPlan
from kvxfer.transport import tuned
from kvxfer.transport.base import FinishedTransfer, Link, Op, Transfer, Tuning
from kvxfer.transport.board import PeerSlot
from kvxfer.transport.stream_mark import After, mark
from kvxfer.tuning import ENGINES_OF, Section

ENGINES = ENGINES_OF["shm"]
# Below this a transfer is likely to be read from the cache soon, and plain stores leave it there.
BYPASS_CACHE_BYTES = 16 << 20
_MAX_DEFAULT_THREADS = 8


def default_num_threads() -> int:
    """CPUs this process may run on, up to eight: more threads do not raise a host's rate."""
    return min(len(os.sched_getaffinity(0)), _MAX_DEFAULT_THREADS)


def choose_num_threads(asked: int | None, section: Section) -> int:
    """Threads of a link's copies: as asked, else by the profile, else the default.

    The profile's are of the whole machine; a process that may use less of it gets no more.
    """
    if asked is not None:
        return asked
    if section.num_threads is None:
        return default_num_threads()
    return min(section.num_threads, len(os.sched_getaffinity(0)))


def plan_tables(plan: CopyPlan) -> _core.PlanTables:
    """A plan as the core walks it."""
    return _core.PlanTables(
        plan.src_planes,
        plan.dst_planes,
        plan.segments,
        plan.box_table(),
        plan.inverse_scales,
        plan.conversion,
    )


def copy_mapped(pool: _core.WorkerPool, plan: CopyPlan, engine: str) -> str:
    """Copy between addresses that are both mapped here; returns the engine that was used.

    Raises:
        InvalidUsage: an unknown engine.
    """
    if engine not in ENGINES:
        raise InvalidUsage(f"engine {engine!r} on host memory; use auto, memcpy or streaming")
    if engine == "auto":
        engine = "streaming" if plan.total_bytes >= BYPASS_CACHE_BYTES else "memcpy"
    if plan.num_pages:
        _core.paged_copy_host(pool, plan_tables(plan), engine == "streaming")
    return engine


def refuse_gpu_options(tuning: Tuning, after: After) -> None:
    """Check that nothing was asked for that only a GPU's copy has.

    Raises:
        InvalidUsage: thread blocks, or an order behind a stream.
    """
    if tuning.num_sms:
        raise InvalidUsage(
            f"num_sms={tuning.num_sms} with host memory, which no GPU copies; leave it 0"
        )
    mark(-1, after)


class HostLink(Link):
    """A link that copies in ``post`` itself and signals after the copy."""

    copies_in_post = True

    def __init__(self, slot: PeerSlot, num_threads: int | None, section: Section) -> None:
        """Complete on ``slot``; see :func:`choose_num_threads` for the others."""
        self._slot = slot
        self._section = section
        self.num_threads = choose_num_threads(num_threads, section)
        self._pool: _core.WorkerPool | None = _core.WorkerPool(self.num_threads)
        self._lock = threading.Lock()

    @property
    def _workers(self) -> _core.WorkerPool:
        if self._pool is None:
            raise InvalidUsage("this link is closed; connect again")
        return self._pool

    def post(
        self,
        plan: CopyPlan,
        op: Op,
        *,
        tuning: Tuning | None = None,
        after: After = None,
    ) -> Transfer:
        """Copy now, in the calling thread and the pool's; the GIL is released meanwhile."""
        tuning = tuning or Tuning()
        refuse_gpu_options(tuning, after)
        engine = tuning.engine
        if engine == "auto":
            engine = tuned.rule_for(self._section, op.value, plan).engine
        with self._lock:
            if self._pool is None:
                raise InvalidUsage("this link is closed; connect again")
            self._slot.require_open()
            path = self._copy(plan, op, engine)
            sequence = self._slot.next_sequence()
            self._slot.signal(sequence)
        return FinishedTransfer(plan.total_bytes, path, sequence)

    @abstractmethod
    def _copy(self, plan: CopyPlan, op: Op, engine: str) -> str:
        """Copy all of ``plan``; returns what carried it."""

    def require_open(self) -> None:
        """Check the peer's process and its board, unless a copy runs, which has done so."""
        if self._lock.acquire(blocking=False):
            try:
                self._slot.require_open()
            finally:
                self._lock.release()

    def limit_tuning(self) -> Tuning:
        """The same stores, or the same kernel call, as a paged copy of that size."""
        return Tuning()

    def close(self) -> None:
        """Refuse later copies, wait for one that runs, and give up mappings and threads."""
        with self._lock:
            self._pool = None
            self._unmap()

    def _unmap(self) -> None:
        """Drop what is mapped of the peer's regions; may be called more than once."""
