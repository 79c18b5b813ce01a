"""Engines, routers, links and the client of one simulation, joined."""

from kvxfer.errors import InvalidUsage
from kvxfer.pd.planner.engine_model import EngineModel, StepModel
from kvxfer.pd.planner.kv_size import KVSize
from kvxfer.pd.planner.setup import Setup
from kvxfer.pd.planner.simulation.clock import Clock
from kvxfer.pd.planner.simulation.costs import StepCosts
from kvxfer.pd.planner.simulation.engine import Engine
from kvxfer.pd.planner.simulation.handover import Transfers
from kvxfer.pd.planner.simulation.job import Job
from kvxfer.pd.planner.simulation.memory import KVMemory
from kvxfer.pd.planner.simulation.prefix_cache import PrefixCache
from kvxfer.pd.planner.simulation.waiting import Waiting
from kvxfer.pd.planner.strategies import batching_of
from kvxfer.pd.planner.strategies.chunked import ChunkedPrefill
from kvxfer.pd.planner.strategies.remote_store import Store
from kvxfer.pd.planner.strategies.routing import Router
from kvxfer.pd.planner.trace import Trace
from kvxfer.pd.planner.transfer_model import TransferModel


class Cluster:
    """A set-up that serves a trace; `run` once, then read ``jobs`` and ``engines``."""

    def __init__(
        self,
        setup: Setup,
        trace: Trace,
        model: EngineModel,
        kv: KVSize,
        transfer: TransferModel | None,
    ) -> None:
        """Put the engines up; nothing is sent."""
        self.jobs: list[Job] = []
        self._setup, self._trace, self._kv = setup, trace, kv
        self._clock = Clock()
        self._is_pd = setup.kind == "pd"
        strategy = setup.strategy
        self._transfers = Transfers(self._clock, setup, kv, transfer)
        self._store = None
        if strategy.store is not None:
            self._store = Store(self._clock, strategy.store, kv.bytes_per_token, trace.hash_tokens)
        self.models = [model.at_tp(tp) for tp in setup.prefill_tps]
        self.models += [model.at_tp(setup.decode_tp) for _ in range(setup.num_decode)]
        self.engines = [self._engine(index, steps) for index, steps in enumerate(self.models)]
        prefill, decode = self.engines[: setup.num_prefill], self.engines[setup.num_prefill :]
        self._router = Router(prefill, strategy.routing, strategy.num_long_engines)
        self._decode_router = Router(decode, "least_loaded")
        self._num_sent = 0
        self._awaited = -1  # the last request whose arrival was put on the clock
        self._num_in_flight = 0

    def run(self) -> None:
        """Serve every request to its end.

        Raises:
            InvalidUsage: a request does not fit an engine's KV memory.
        """
        self._send_next()
        self._clock.run()
        while any(job.remaining for job in self.jobs):
            self._last_call()

    def findings(self) -> list[str]:
        """What the hand-overs took from outside the measurements."""
        return self._transfers.findings() if self._is_pd else []

    def _engine(self, index: int, steps: StepModel) -> Engine:
        setup, strategy = self._setup, self._setup.strategy
        decodes_only = index >= setup.num_prefill
        cache = None
        if strategy.prefix_cache and not decodes_only:
            cache = PrefixCache(self._trace.hash_tokens)
        return Engine(
            index,
            self._clock,
            StepCosts(steps, setup.max_num_seqs),
            ChunkedPrefill() if decodes_only else batching_of(strategy),
            Waiting(0.0 if decodes_only else strategy.long_penalty_s),
            KVMemory(steps.kv_capacity_tokens, self._kv.block_tokens, cache),
            token_budget=setup.token_budget,
            max_num_seqs=setup.max_num_seqs,
            on_prefilled=self._prefilled,
            on_ended=self._ended,
            load=self._load,
        )

    # The client.

    def _send_next(self) -> None:
        """Send what has come and may be in flight; come back for what has not come yet."""
        requests, limit = self._trace.requests, self._trace.concurrency
        while self._num_sent < len(requests) and (limit is None or self._num_in_flight < limit):
            request = requests[self._num_sent]
            if request.arrival_s > self._clock.now_s:
                if self._awaited < self._num_sent:
                    self._awaited = self._num_sent
                    self._clock.at(request.arrival_s, self._send_next)
                return
            self._send()

    def _send(self) -> None:
        request = self._trace.requests[self._num_sent]
        is_long = request.num_prompt_tokens > self._setup.strategy.long_prompt_tokens
        job = Job(self._num_sent, request, self._clock.now_s, is_long)
        self._num_sent += 1
        self._num_in_flight += 1
        self.jobs.append(job)
        engine = self._router.pick(job)
        engine.memory.check(
            job, request.num_prompt_tokens + (0 if self._is_pd else request.num_output_tokens)
        )
        request_s = self.models[engine.index].request_s
        if request_s:
            self._clock.at(self._clock.now_s + request_s, engine.submit, job)
        else:
            engine.submit(job)

    def _last_call(self) -> None:
        """Nothing more comes: batches that wait for more run as they are."""
        for engine in self.engines:
            engine.last_call()
        if not self._clock.has_calls:
            raise InvalidUsage("requests wait for one another's KV memory; use more GPUs an engine")
        self._clock.run()

    # What engines tell.

    def _load(self, engine: Engine, job: Job) -> bool:
        if job.handover is not None:
            self._transfers.start(job, engine, lambda: self._transferred(engine, job))
            return True
        local = engine.memory.hit_tokens(job)
        stored = self._store.hit_tokens(job) if self._store is not None else 0
        job.computed = max(local, stored)
        if not job.num_delivered:
            job.hit_tokens = job.computed
        if self._store is None or stored <= local:
            return False
        self._store.load(stored - local, lambda: engine.loaded(job))
        return True

    def _transferred(self, engine: Engine, job: Job) -> None:
        job.transfer_s = self._clock.now_s - job.prefilled_s
        engine.loaded(job)

    def _prefilled(self, engine: Engine, job: Job) -> bool:
        if engine.index >= self._setup.num_prefill:
            return True
        if self._store is not None:
            self._store.insert(job)
        if not self._is_pd:
            return True
        if self._setup.first_token_from == "prefill":
            job.deliver(self._clock.now_s)
            if not job.remaining:
                engine.leave(job)
                return False
            job.prompt += 1
        self._hand_over(engine, job)
        return False

    def _hand_over(self, source: Engine, job: Job) -> None:
        computed = job.request.num_prompt_tokens - job.hit_tokens
        last_chunk = (computed - 1) % self._setup.token_budget + 1
        source_tp = self.models[source.index].tp_size
        job.handover = self._transfers.prepare(job, source, source_tp, last_chunk)
        job.computed = job.prompt - 1  # the decode engine computes the last one, for its token
        source.num_assigned -= 1
        target = self._decode_router.pick(job)
        target.memory.check(job, job.request.num_prompt_tokens + job.request.num_output_tokens)
        target.submit(job)

    def _ended(self) -> None:
        self._num_in_flight -= 1
        self._send_next()
