"""A sweep from options to a report: one far-side agent, one rig a case."""

import logging
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from kvxfer import _core
from kvxfer.closing import Closing
from kvxfer.errors import InvalidUsage, KvxferError, NotAvailable, VerificationError
from kvxfer.memory import MemoryKind
from kvxfer.sweep.agent import Agent, SweepAgent
from kvxfer.sweep.agent_process import AgentProcess
from kvxfer.sweep.cases import ALL_SMS, AUTO_SMS, SweepCase, SweepOptions, expand_cases
from kvxfer.sweep.environment import environment
from kvxfer.sweep.measure import Measurement, default_iters
from kvxfer.sweep.result import SCHEMA, Skipped, SweepReport, SweepResult
from kvxfer.sweep.rig import Rig, RigSpec
from kvxfer.transport import Tuning, create_transport
from kvxfer.transport.device_copy import DEFAULT_NUM_SMS
from kvxfer.transport.device_copy import ENGINES as DEVICE_ENGINES
from kvxfer.transport.host_copy import ENGINES as HOST_ENGINES
from kvxfer.transport.host_copy import default_num_threads

_log = logging.getLogger(__name__)
# The channel that carried an error of the far side, which is of no use to a reader here.
_CHANNEL = re.compile(r"^tcp://\S+: ")


class SweepRun(Closing):
    """A sweep under way. A context manager; the report grows as cases end.

    Attributes:
        report: what has been measured so far.
        cases: all cases, in order.
    """

    def __init__(self, options: SweepOptions) -> None:
        """Check the options and start the far side.

        Raises:
            InvalidUsage: an option is wrong; nothing was started.
            NotAvailable: the transport does not work here.
        """
        self._options = options
        self._transport = _resolve_transport(options.transport)
        _require_applicable(options, self._transport)
        self._devices = (-1, -1)
        if self._transport == "nvlink":
            self._devices = choose_devices(options.devices)
            options = replace(options, sms=_resolve_sms(options, self._devices))
        self.cases = expand_cases(options, transport=self._transport)
        self._num_threads = options.num_threads or default_num_threads()
        self.report = SweepReport(schema=SCHEMA, environment=environment(), results=[])
        self._stack = ExitStack()
        self._process: AgentProcess | None = None
        self._agent: SweepAgent
        if self._transport == "loopback":
            agent = Agent()
            self._stack.callback(agent.close)
            self._agent = agent
        else:
            self._process = self._stack.enter_context(AgentProcess())
            self._agent = self._process

    @property
    def num_rounds(self) -> int:
        """Timed rounds of all cases: the length of a progress bar."""
        return sum(self.rounds_of(case) for case in self.cases)

    def rounds_of(self, case: SweepCase) -> int:
        """Timed rounds of one case."""
        return self._options.iters or default_iters(case.total_bytes)

    def run_case(
        self, case: SweepCase, on_round: Callable[[], None] = lambda: None
    ) -> SweepResult | None:
        """Measure one case into the report; None where it was skipped or failed.

        Raises:
            PeerLost: the far side ended.
        """
        try:
            result = self._measure(case, on_round)
        except (NotAvailable, VerificationError) as error:
            failed = isinstance(error, VerificationError)
            self._note_skipped(case, error, failed=failed)
            return None
        except KvxferError as error:
            self._note_skipped(case, error, failed=True)
            if self._process is not None:
                self._process.require_alive()
            raise
        self.report.results.append(result)
        _log.info("%s: %.4g GB/s", case.label, result.gb_per_s.p50)
        return result

    def close(self) -> None:
        """End the far side; may be called more than once."""
        self._stack.close()

    def _measure(self, case: SweepCase, on_round: Callable[[], None]) -> SweepResult:
        options = self._options
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
        )
        with Rig(spec, self._agent) as rig:
            result = Measurement(
                case,
                rig,
                tuning=Tuning(options.engine, case.num_sms),
                num_threads=self._num_threads,
                iters=options.iters,
                warmup=options.warmup,
                seed=options.seed,
                on_round=on_round,
            ).run(options.compute)
        return self._judge_path(result)

    def _note_skipped(self, case: SweepCase, error: KvxferError, *, failed: bool) -> None:
        reason = _CHANNEL.sub("", str(error))
        self.report.skipped.append(Skipped(case.label, reason, failed))
        # Not an error here: the report says it.
        _log.info("%s: %s", case.label, reason)

    def _judge_path(self, result: SweepResult) -> SweepResult:
        """A transport asked for by name must be what carried the bytes."""
        if self._transport == "nvlink" and result.actual_path.startswith("pcie"):
            text = f"the two GPUs share no NVLink: {result.actual_path} carried the bytes"
            if self._options.transport == "nvlink":
                raise VerificationError(f"{text}, though nvlink was asked for")
            result.notes.append(text)
        return result


def _require_applicable(options: SweepOptions, transport: str) -> None:
    """Refuse what the transport cannot do, before anything is started."""
    on_device = transport == "nvlink"
    if not on_device:
        if options.compute is not None:
            raise NotAvailable(f"--with-compute needs GPUs; this run is over {transport}")
        if options.sms != (AUTO_SMS,):
            raise InvalidUsage(f"--sms is of copies by a GPU; this run is over {transport}")
        if options.devices is not None:
            raise InvalidUsage(f"--devices is of copies by a GPU; this run is over {transport}")
    engines = tuple(DEVICE_ENGINES) if on_device else HOST_ENGINES
    if options.engine not in engines:
        raise InvalidUsage(
            f"engine {options.engine!r} over {transport}; use {', '.join(engines[:-1])} or "
            f"{engines[-1]}"
        )


def _resolve_transport(name: str) -> str:
    if name != "auto":
        memory = MemoryKind.DEVICE if name == "nvlink" else MemoryKind.HOST
        return create_transport(name, memory=memory).name
    has_gpu = _core.device_count() > 0
    return create_transport("auto", memory=MemoryKind.DEVICE if has_gpu else MemoryKind.HOST).name


def _resolve_sms(options: SweepOptions, devices: tuple[int, int]) -> tuple[int, ...]:
    available = min(_core.device_info(device).num_sms for device in devices)
    budgets = {AUTO_SMS: DEFAULT_NUM_SMS, ALL_SMS: available}
    wanted = tuple(budgets.get(count, count) for count in options.sms)
    if max(wanted) > available:
        raise InvalidUsage(f"{max(wanted)} SMs; these GPUs have {available}")
    return wanted


def choose_devices(wanted: tuple[int, int] | None) -> tuple[int, int]:
    """CUDA devices of source and destination; None = the first two, or the one there is twice.

    Raises:
        InvalidUsage: this process does not see them.
        NotAvailable: there is none, or they have no peer access.
    """
    count = _core.device_count()
    if count == 0:
        raise NotAvailable(_core.no_device_reason())
    source, destination = wanted or (0, min(1, count - 1))
    for device in (source, destination):
        if not 0 <= device < count:
            raise InvalidUsage(f"device {device}; this process sees 0 to {count - 1}")
    if not _core.can_access_peer(source, destination):
        raise NotAvailable(
            f"GPUs {source} and {destination} have no peer access; use --transport shm"
        )
    return source, destination
