"""A sweep of one pair: this process is one side, another, here or on another host, the other."""

from collections.abc import Callable
from dataclasses import replace

from kvxfer.errors import NotAvailable
from kvxfer.sweep.agent import Agent, SweepAgent
from kvxfer.sweep.agent_process import AgentProcess
from kvxfer.sweep.case_run import CaseRun
from kvxfer.sweep.cases import SweepCase, SweepOptions, expand_cases, is_on_device
from kvxfer.sweep.far_agent import FarAgent
from kvxfer.sweep.measure import Measurement
from kvxfer.sweep.paths import choose_devices, choose_near_devices, resolve_sms
from kvxfer.sweep.peers.cases import add_peers
from kvxfer.sweep.peers.process import measure_apart
from kvxfer.sweep.peers.task import PeerTask
from kvxfer.sweep.result import SweepResult
from kvxfer.sweep.rig import Rig, RigSpec
from kvxfer.transport import Tuning
from kvxfer.transport.host_copy import default_num_threads


class SweepRun(CaseRun[SweepCase]):
    """A sweep under way: one far-side agent, one rig a case."""

    def __init__(self, options: SweepOptions) -> None:
        """Check the options and start the far side, or meet it.

        Raises:
            InvalidUsage: an option is wrong; nothing was started.
            NotAvailable: the transport does not work here.
            ControlTimeout: nobody answers at ``options.far_address``.
        """
        super().__init__(options)
        self._devices = (-1, -1)
        if is_on_device(options, self._transport):
            seen: tuple[int, ...]
            if options.far_address:
                self._devices, seen = choose_near_devices(options.devices), (0,)
            else:
                seen = self._devices = choose_devices(options.devices, self._transport)
            options = replace(options, sms=resolve_sms(options.sms, seen))
        own = expand_cases(options, transport=self._transport)
        self.cases, unusable = add_peers(own, options.peers)
        self.report.skipped += unusable
        self._num_threads = options.num_threads or default_num_threads()
        self._process: AgentProcess | None = None
        self._agent: SweepAgent
        if options.far_address:
            far = FarAgent(options.far_address, options.binding.key)
            self._agent = self._stack.enter_context(far)
            self.report.environment |= far.environment
        elif self._transport == "loopback":
            agent = Agent()
            self._stack.callback(agent.close)
            self._agent = agent
        else:
            self._process = self._stack.enter_context(AgentProcess())
            self._agent = self._process

    def _measure(self, case: SweepCase, on_round: Callable[[], None]) -> SweepResult:
        options = self._options
        if case.peer:
            return measure_apart(self._task(case), on_round)
        if (case.transport, case.memory) == ("shm", "private") and options.engine != "auto":
            raise NotAvailable(f"no engine {options.engine} for private memory; only auto")
        spec = RigSpec(
            layout=case.layout,
            num_blocks=case.pool_blocks,
            transport=case.transport,
            memory=case.memory,
            op=case.op,
            num_threads=self._num_threads,
            devices=self._devices,
            shares_host=not options.far_address,
            copy_threads=options.num_threads,
            tuning=case.tuning,
        )
        with Rig(spec, self._agent, options.binding) as rig:
            return Measurement(
                case,
                rig,
                tuning=Tuning(options.engine, case.num_sms),
                iters=options.iters,
                warmup=options.warmup,
                seed=options.seed,
                on_round=on_round,
            ).run(options.compute)

    def _task(self, case: SweepCase) -> PeerTask:
        options = self._options
        return PeerTask(
            case=case,
            devices=self._devices,
            num_threads=self._num_threads,
            iters=options.iters,
            warmup=options.warmup,
            seed=options.seed,
        )

    def _goes_on_after(self, case: SweepCase) -> bool:
        return bool(case.peer)  # its processes are not the sweep's

    def _require_alive(self) -> None:
        if self._process is not None:
            self._process.require_alive()
