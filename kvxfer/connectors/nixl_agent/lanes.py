"""What carries transfers: threads for host memory, a GPU for its own, and what ends them.

A lane has one thread, started with its first job, that sees each job to its end in the order of
posting and then has its notification sent. So notifications leave without anybody polling, and
never before the bytes are there.
"""

import logging
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable

from kvxfer import _core
from kvxfer.closing import Closing
from kvxfer.errors import KvxferError, NotAvailable, TransferTimeout
from kvxfer.memory import create_segment
from kvxfer.transport.device_copy import DEFAULT_NUM_SMS
from kvxfer.transport.host_copy import BYPASS_CACHE_BYTES, default_num_threads

_log = logging.getLogger(__name__)
MAX_JOBS = 4096
_COPY_S = 60.0  # far above what any copy takes
_CLOSE_S = 30.0
# Below this a copy takes less than a thread takes to wake.
_AT_ONCE_BYTES = 256 << 10


class Copy:
    """What one transfer does, as often as it is posted.

    Args:
        plan: the descriptors.
        attached_pid: the process whose private memory is the far side; 0 where all is mapped.
        writes: whether the far side is the destination.
        require_sound: raises where a side's memory or process is gone.
    """

    def __init__(
        self,
        plan: _core.ListPlan,
        *,
        attached_pid: int,
        writes: bool,
        require_sound: Callable[[], None],
    ) -> None:
        self.plan = plan
        self.num_bytes = plan.num_bytes
        self.attached_pid = attached_pid
        self.writes = writes
        self.require_sound = require_sound

    def on_host(self, pool: _core.WorkerPool) -> None:
        """Copy with threads; returns when all bytes are visible."""
        if self.attached_pid:
            self.plan.copy_process_vm(pool, self.attached_pid, self.writes)
        else:
            self.plan.copy_host(pool, self.num_bytes >= BYPASS_CACHE_BYTES)


class Job:
    """One posting of a transfer.

    Attributes:
        state: NIXL's word: ``PROC``, ``DONE`` or ``ERR``.
        posted_us: when it was posted, microseconds of the monotonic clock.
        post_us: how long posting took; of the poster to set.
        ended_us: when it ended, likewise.
    """

    def __init__(self, copy: Copy, notify: Callable[[], None]) -> None:
        self.state = "PROC"
        self.posted_us = now_us()
        self.post_us = 0
        self.ended_us = 0
        self._copy, self._notify = copy, notify
        self._lock = threading.Lock()
        self._is_begun = False

    @property
    def copy(self) -> Copy:
        """What it does."""
        return self._copy

    def begin(self) -> bool:
        """Whether it may go on: it was not cancelled. From now on it cannot be."""
        with self._lock:
            self._is_begun = self._is_begun or self.state == "PROC"
            return self.state == "PROC"

    def cancel(self) -> bool:
        """Whether nothing of it is copied, now or later."""
        with self._lock:
            if not self._is_begun:
                self.state = "ERR"
            return self.state != "PROC"

    def finish(self, work: Callable[[], None]) -> None:
        """Do ``work``, send the notification, and say that it is done; or that it failed."""
        try:
            work()
            self._notify()
        except Exception as error:  # of ours or of NIXL's: whoever asks is told ERR
            _log.error("a transfer of %d bytes failed: %s", self._copy.num_bytes, error)
            self._end("ERR")
        else:
            self._end("DONE")

    def fail(self) -> None:
        """It was not started."""
        self._end("ERR")

    def _end(self, state: str) -> None:
        self.ended_us = now_us()
        self.state = state


class Lane(Closing):
    """Carries jobs in the order of posting."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[tuple[Job, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    @abstractmethod
    def post(self, job: Job) -> None:
        """Start ``job``; what goes wrong later is in its state.

        Raises:
            KvxferError: nothing was started.
        """

    def _add(self, job: Job, work: Callable[[], None]) -> None:
        with self._changed:
            self._require_room()
            self._jobs.append((job, work))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def _require_room(self) -> None:
        if self._closed:
            raise NotAvailable("the agent is closed")
        if len(self._jobs) >= MAX_JOBS:
            raise NotAvailable(f"{MAX_JOBS} transfers wait, which is the limit; post later")

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs:
                    if self._closed:
                        return
                    self._changed.wait()
                job, work = self._jobs.popleft()
            if job.begin():
                job.finish(work)
            del job, work  # they hold memory and mappings, and the next may be long in coming

    def close(self) -> None:
        """Refuse later jobs and wait for the thread: a copy that runs goes on to its end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)


class HostLane(Lane):
    """Copies host memory."""

    def __init__(self) -> None:
        super().__init__("kvxfer-nixl-host")
        self._pool: _core.WorkerPool | None = None
        self._alone = _core.WorkerPool(1)

    def post(self, job: Job) -> None:
        """Copy a few pages here and now, more of them in the lane's thread."""
        job.copy.require_sound()
        if job.copy.num_bytes <= _AT_ONCE_BYTES:
            job.begin()
            job.finish(lambda: job.copy.on_host(self._alone))
            return
        self._add(job, lambda: self._carry(job.copy))

    def _carry(self, copy: Copy) -> None:
        if self._closed:
            raise NotAvailable("the agent was closed before the transfer began")
        if self._pool is None:  # in the lane's thread alone
            self._pool = _core.WorkerPool(default_num_threads())
        copy.on_host(self._pool)


class DeviceLane(Lane):
    """Copies with one GPU, on a stream of its own."""

    def __init__(self, device: int) -> None:
        """Use that GPU.

        Raises:
            KvxferError: it does not work here.
        """
        super().__init__(f"kvxfer-nixl-gpu{device}")
        self._flags = create_segment(_core.CompletionBoard.SLOT_BYTES)
        self._copier = _core.DeviceCopier(device, self._flags.address, 1)
        self._sequence = 0
        self._stuck: list[Copy] = []
        self._posting = threading.Lock()

    def post(self, job: Job) -> None:
        """Queue the copy on the GPU now; the lane's thread waits for it."""
        job.copy.require_sound()
        with self._posting:
            self._require_room()  # before the GPU starts what nobody would wait for
            self._sequence += 1
            sequence = self._sequence
            try:
                job.copy.plan.post(
                    self._copier, 0, sequence, DEFAULT_NUM_SMS, _core.CopyEngine.AUTO
                )
            except (KvxferError, TypeError):
                self._sequence -= 1
                raise
            job.begin()
            self._add(job, lambda: self._await(job.copy, sequence))

    def _await(self, copy: Copy, sequence: int) -> None:
        if not self._copier.wait(0, sequence, _COPY_S):
            self._stuck.append(copy)  # its memory must stay mapped
            raise TransferTimeout(
                f"a copy of {copy.num_bytes} bytes has not ended within {_COPY_S} s"
            )
        copy.require_sound()


def now_us() -> int:
    """The monotonic clock, in microseconds."""
    return time.monotonic_ns() // 1000
