"""Requests that wait at an engine, in the order in which they are to run.

By arrival; a long prompt counts as having come ``long_penalty_s`` later, which is the priority
penalisation of TNG's "How Long Prompts Block Other Requests": it waits for shorter ones, but not
for ever. Long ones have a heap of their own, so that others may pass them where they may not run.
"""

import heapq

from kvxfer.pd.planner.simulation.job import Job

_Entry = tuple[float, int, Job]


class Waiting:
    """A queue of jobs."""

    def __init__(self, long_penalty_s: float = 0.0) -> None:
        """Empty."""
        self._penalty_s = long_penalty_s
        self._short: list[_Entry] = []
        self._long: list[_Entry] = []
        self._num_pushed = 0
        self.num_tokens = 0  # of prompts, not yet computed

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    @property
    def oldest_s(self) -> float | None:
        """When the first of those that wait came; None where none does."""
        heads = [heap[0][2].arrived_s for heap in (self._short, self._long) if heap]
        return min(heads, default=None)

    def push(self, job: Job) -> None:
        """Add one that came at ``job.arrived_s``."""
        self._num_pushed += 1
        penalty_s = self._penalty_s if job.is_long else 0.0
        entry = (job.arrived_s + penalty_s, self._num_pushed, job)
        heapq.heappush(self._long if job.is_long else self._short, entry)
        self.num_tokens += job.prompt - job.computed

    def first(self, *, allow_long: bool = True) -> Job | None:
        """The next to run; None where none may."""
        heap = self._first_heap(allow_long)
        return heap[0][2] if heap else None

    def pop(self, *, allow_long: bool = True) -> Job:
        """Take the next to run out."""
        job = heapq.heappop(self._first_heap(allow_long))[2]
        self.num_tokens -= job.prompt - job.computed
        return job

    def _first_heap(self, allow_long: bool) -> list[_Entry]:
        if not allow_long or not self._long:
            return self._short
        if not self._short:
            return self._long
        return min(self._short, self._long, key=lambda heap: heap[0][:2])
