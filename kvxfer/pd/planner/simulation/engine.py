"""One engine of a simulation: it batches, runs steps, and hands out tokens.

An event is a step with chunks of prompts, or a run of steps alike that only decode: as many as
until a request ends, memory runs out, or the growing context has made them `_GROWTH` slower. A
request that comes meanwhile cuts the run short at the end of the step that is under way.
"""

import heapq
import math
from collections.abc import Callable, Iterator

from kvxfer.pd.planner.engine_model import pairs_of
from kvxfer.pd.planner.simulation.clock import Clock
from kvxfer.pd.planner.simulation.costs import StepCosts
from kvxfer.pd.planner.simulation.job import Job
from kvxfer.pd.planner.simulation.memory import KVMemory
from kvxfer.pd.planner.simulation.timeline import Timeline
from kvxfer.pd.planner.simulation.waiting import Waiting
from kvxfer.pd.planner.strategies import Batching

Chunk = tuple[Job, int]
"""A job and how many tokens of its prompt a step computes."""

_GROWTH = 0.01


class Engine:
    """An engine.

    Args:
        index: among all of the simulation.
        clock: the simulation's.
        costs: of its steps.
        batching: what it runs next.
        waiting: an empty queue.
        memory: its KV.
        token_budget: most tokens of one step.
        max_num_seqs: most requests that it runs at once.
        on_prefilled: takes a job whose prompt is computed; returns whether the job goes on here.
        on_ended: called for each job that has all its tokens.
        load: brings a job's KV that is not computed here, and calls `loaded` later; returns whether
            there is any.
    """

    def __init__(
        self,
        index: int,
        clock: Clock,
        costs: StepCosts,
        batching: Batching,
        waiting: Waiting,
        memory: KVMemory,
        *,
        token_budget: int,
        max_num_seqs: int,
        on_prefilled: "Callable[[Engine, Job], bool]",
        on_ended: Callable[[], None],
        load: "Callable[[Engine, Job], bool]",
    ) -> None:
        """Idle."""
        self.index = index
        self.clock = clock
        self.waiting = waiting
        self.memory = memory
        self.token_budget = token_budget
        self.timeline = Timeline()
        self.prefilling: list[Job] = []
        self.num_loading = 0
        self.num_assigned = 0  # routed here and not ended: the router's count
        self.num_routed = 0
        self.is_last_call = False
        self.num_preempted = 0
        self.busy_s = 0.0
        self.most_decoding = 0
        self.most_context = 0
        self._costs = costs
        self._batching = batching
        self._max_num_seqs = max_num_seqs
        self._on_prefilled = on_prefilled
        self._on_ended = on_ended
        self._load = load
        self._decoding: dict[Job, None] = {}  # in the order in which they joined
        self._ends: list[tuple[int, int, Job]] = []  # (last step, job) of all that decode
        self._context = 0  # tokens of all that decode
        self._num_steps = 0
        self._is_running = False
        self._is_ending = False
        self._is_due = False
        self._started_s = 0.0
        self._chunks: list[Chunk] = []
        self._run = 0  # steps of the run under way
        self._first_s = 0.0  # time of its first step
        self._growth_s = 0.0  # by which each step is slower than the one before
        self._version = 0

    @property
    def num_decoding(self) -> int:
        """Sequences that get a token each step."""
        return len(self._decoding)

    @property
    def num_prompts(self) -> int:
        """Requests whose prompts are being computed or loaded."""
        return len(self.prefilling) + self.num_loading

    @property
    def num_running(self) -> int:
        """Requests that hold memory."""
        return len(self._decoding) + self.num_prompts

    @property
    def pending_tokens(self) -> int:
        """Tokens of prompts that are not yet computed."""
        return self.waiting.num_tokens + sum(job.prompt - job.computed for job in self.prefilling)

    def submit(self, job: Job) -> None:
        """Queue a job."""
        job.arrived_s = self.clock.now_s
        self.waiting.push(job)
        self.wake()

    def loaded(self, job: Job) -> None:
        """The KV that a job waited for is here."""
        self.num_loading -= 1
        self.prefilling.append(job)
        self.wake()

    def release(self, num_tokens: int) -> None:
        """Give back the memory of a request that left for another engine."""
        self.memory.release(num_tokens)
        self.wake()

    def leave(self, job: Job) -> None:
        """A request has all its tokens."""
        self.memory.release(job.held)
        self.num_assigned -= 1
        self._on_ended()

    def wake(self) -> None:
        """Something changed: run if idle, or come to the end of the step under way."""
        if self._is_ending or self._is_due:
            return  # it starts by itself
        if not self._is_running:
            self._is_due = True  # all that comes at this instant comes first
            self.clock.at(self.clock.now_s, self._begin)
        elif self._run > 1 and self._batching.joins(self):
            self._cut_short()

    def last_call(self) -> None:
        """Nothing more comes before this engine moves: a batch that waits for more runs now."""
        if not self._is_running:
            self.is_last_call = True
            self._start()
            self.is_last_call = False

    def admit(self, *, allow_long: bool = True) -> bool:
        """Take the next job that waits, if there is one and it fits."""
        job = self.waiting.first(allow_long=allow_long)
        if job is None or self.num_running >= self._max_num_seqs:
            return False
        if not self.memory.fits(job, len(self._decoding)):
            return False
        self.waiting.pop(allow_long=allow_long)
        self.memory.hold(job)
        if math.isnan(job.started_s):
            job.started_s = self.clock.now_s
        self.num_loading += 1
        if not self._load(self, job):
            self.num_loading -= 1
            self.prefilling.append(job)
        return True

    def prompts(self) -> Iterator[Job]:
        """Jobs whose prompts are to be computed: those that run, then others, one by one."""
        at = 0
        while at < len(self.prefilling) or self.admit():
            if at < len(self.prefilling):
                yield self.prefilling[at]
                at += 1

    def _begin(self) -> None:
        self._is_due = False
        self._start()

    def _start(self) -> None:
        if not self._make_room():
            return
        chunks = self._batching.chunks(self)
        if chunks:
            self._start_chunks(chunks)
        elif self._decoding:
            self._start_run()
        else:
            return
        self._is_running = True
        self._started_s = self.clock.now_s
        self._schedule_end()

    def _start_chunks(self, chunks: list[Chunk]) -> None:
        """One step with chunks; a chunk of one token costs what a sequence that decodes does."""
        num_decoding, context = len(self._decoding), self._context
        num_tokens, num_pairs = 0, 0.0
        for job, count in chunks:
            if count == 1:
                num_decoding += 1
                context += job.computed + 1
            else:
                num_tokens += count
                num_pairs += pairs_of(count, job.computed)
        self._chunks, self._run, self._growth_s = chunks, 1, 0.0
        self._first_s = self._costs.step_s(num_decoding, context, num_tokens, num_pairs)
        self._note(num_decoding, context)

    def _start_run(self) -> None:
        num_decoding = len(self._decoding)
        first_s = self._costs.step_s(num_decoding, self._context, 0, 0.0)
        growth_s = self._costs.context_s * num_decoding
        steps = self._next_end() - self._num_steps
        if growth_s > 0.0:
            steps = min(steps, 1 + int(_GROWTH * first_s / growth_s))
        free = self.memory.free_tokens()
        if free is not None:
            steps = min(steps, max(1, free // num_decoding))
        self._chunks, self._run = [], steps
        self._first_s, self._growth_s = first_s, growth_s
        self._note(num_decoding, self._context + (steps - 1) * num_decoding)

    def _note(self, num_decoding: int, context: int) -> None:
        self.most_decoding = max(self.most_decoding, num_decoding)
        self.most_context = max(self.most_context, context)

    def _duration_s(self, num_steps: int) -> float:
        return num_steps * (self._first_s + self._growth_s * (num_steps - 1) / 2)

    def _schedule_end(self) -> None:
        self._version += 1
        ends_s = self._started_s + self._duration_s(self._run)
        self.clock.at(ends_s, self._end, self._version)

    def _cut_short(self) -> None:
        """End the run with the step that is under way."""
        elapsed_s = self.clock.now_s - self._started_s
        half = self._growth_s / 2
        rate = self._first_s - half
        if half > 0.0:
            exact = (math.sqrt(rate * rate + 4 * half * elapsed_s) - rate) / (2 * half)
        else:
            exact = elapsed_s / self._first_s
        steps = max(1, math.ceil(exact - 1e-9))
        if steps < self._run:
            self._run = steps
            self._schedule_end()

    def _end(self, version: int) -> None:
        """A run is over: everybody who decodes has got its tokens."""
        if version != self._version:
            return
        self._is_ending = True
        duration_s = self._duration_s(self._run)
        grown = self._run * len(self._decoding)
        self._num_steps += self._run
        self._context += grown
        self.memory.grow(grown)
        self.busy_s += duration_s
        self.timeline.add(duration_s, self._run, len(self._decoding))
        for job in self._take_ended():
            self._stop_decoding(job)
            self.leave(job)
        for job, count in self._chunks:
            job.computed += count
            if job.computed == job.prompt:
                self.prefilling.remove(job)
                self._prefilled(job)
        self._is_running = self._is_ending = False
        self._start()

    def _next_end(self) -> int:
        """The step at which the next job ends; entries of jobs that were put back are dropped."""
        ends = self._ends
        while ends[0][0] != ends[0][2].last_step:
            heapq.heappop(ends)
        return ends[0][0]

    def _take_ended(self) -> Iterator[Job]:
        while self._decoding and self._next_end() <= self._num_steps:
            yield heapq.heappop(self._ends)[2]

    def _prefilled(self, job: Job) -> None:
        self.memory.remember(job)
        if math.isnan(job.prefilled_s):
            job.prefilled_s = self.clock.now_s
        if not self._on_prefilled(self, job):
            return
        job.deliver(self.clock.now_s)
        if not job.remaining:
            self.leave(job)
            return
        job.begin = len(self.timeline)
        job.last_step = self._num_steps + job.remaining
        self._decoding[job] = None
        heapq.heappush(self._ends, (job.last_step, job.index, job))
        self._context += job.prompt + 1

    def _stop_decoding(self, job: Job) -> None:
        """It has the tokens of all steps so far, and gets no more."""
        del self._decoding[job]
        left = job.last_step - self._num_steps
        num_new = job.remaining - left
        self._context -= job.prompt + 1 + num_new
        job.held += num_new
        job.remaining = left
        job.num_delivered += num_new
        job.last_step = -1
        if num_new:
            job.pieces.append((self.index, job.begin, len(self.timeline)))
            job.last_s = self.clock.now_s
        job.prompt += 1 + num_new  # what a preempted job computes anew

    def _make_room(self) -> bool:
        """Put back the jobs that came last until each other has room for its next token.

        They are computed anew, as vLLM does it. False where only jobs that load are left to put
        back: then those that decode wait for them.
        """
        while not self._has_room():
            if self.prefilling:
                job = self.prefilling.pop()
            elif len(self._decoding) > 1:
                job = next(reversed(self._decoding))
                self._stop_decoding(job)
            else:
                return False
            self.memory.release(job.held)
            job.computed = 0
            self.num_preempted += 1
            self.waiting.push(job)
        return True

    def _has_room(self) -> bool:
        free = self.memory.free_tokens()
        return free is None or free >= len(self._decoding)
