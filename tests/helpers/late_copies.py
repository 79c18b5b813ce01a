"""Copies of the `nixl` transport that end later, as those of a GPU do, without a GPU."""

from kvxfer import _core
from kvxfer.errors import KvxferError
from kvxfer.layout import CopyPlan
from kvxfer.transport.host_copy import plan_tables
from kvxfer.transport.nixl.copies import Copies

NEVER = 1 << 62


class LateCopies(Copies):
    """Runs a copy once it was asked ``num_looks`` times whether it is over.

    Attributes:
        num_looks: changed at any time.
        lies: says that copies are over which have not begun.
        error: raised in place of answers.
        most: how many copies were under way at once.
        num_drained: copies that were under way when all had to end.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_looks = 5
        self.lies = False
        self.error: KvxferError | None = None
        self.most = self.num_drained = 0
        self._pool = _core.WorkerPool(num_threads)
        self._waiting: dict[int, CopyPlan] = {}
        self._looks: dict[int, int] = {}

    def start(self, slot: int, plan: CopyPlan, *, num_sms: int = 0) -> None:
        assert slot not in self._waiting or self.lies, f"two copies of slot {slot} at once"
        self._waiting[slot], self._looks[slot] = plan, 0
        self.most = max(self.most, len(self._waiting))

    def is_done(self, slot: int) -> bool:
        if self.error is not None:
            raise self.error
        self._looks[slot] += 1
        if self.lies:
            return True
        if self._looks[slot] < self.num_looks:
            return False
        self._run(slot)
        return True

    def drain(self) -> None:
        for slot in list(self._waiting):
            self.num_drained += 1
            self._run(slot)

    def _run(self, slot: int) -> None:
        _core.paged_copy_host(self._pool, plan_tables(self._waiting.pop(slot)), False)
