"""A sweep of ranks from options to a report: processes started once, one rig a row."""

from collections.abc import Callable
from dataclasses import replace

from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.layout import require_compatible
from kvxfer.sweep.case_run import CaseRun
from kvxfer.sweep.cases import SweepOptions, is_on_device, require_checkable
from kvxfer.sweep.describe import describe_layout
from kvxfer.sweep.messages import MAX_RANKS
from kvxfer.sweep.paths import choose_rank_devices, resolve_sms
from kvxfer.sweep.ranks.cases import RankCase, expand_rank_cases
from kvxfer.sweep.ranks.measure import RankMeasurement
from kvxfer.sweep.ranks.rig import RankRig
from kvxfer.sweep.ranks.team import RankTeam
from kvxfer.sweep.result import SweepResult
from kvxfer.transport import Op, Tuning
from kvxfer.transport.host_copy import default_num_threads

_HOST: tuple[tuple[int, ...], tuple[int, ...]] = ((-1,), (-1,))


class RankSweepRun(CaseRun[RankCase]):
    """A sweep of ranks under way: this process only says when."""

    def __init__(self, options: SweepOptions) -> None:
        """Check the options and start as many processes as the largest row has ranks.

        Raises:
            InvalidUsage: an option is wrong; nothing was started.
            NotAvailable: the transport does not work here, or a process did not start.
        """
        super().__init__(options)
        self._devices = _HOST
        if is_on_device(options, self._transport):
            self._devices = choose_rank_devices(options.rank_devices, self._transport)
            sources, destinations = self._devices
            options = replace(options, sms=resolve_sms(options.sms, sources + destinations))
        self.cases = expand_rank_cases(options, transport=self._transport)
        size = max(len(case.src.ranks) + len(case.dst.ranks) for case in self.cases)
        if size > MAX_RANKS:
            raise InvalidUsage(f"{size} ranks on both sides together; use at most {MAX_RANKS}")
        self._team = self._stack.enter_context(RankTeam(size))

    def _measure(self, case: RankCase, on_round: Callable[[], None]) -> SweepResult:
        options = self._options
        require_compatible(case.src.layout, case.dst.layout, case.convert)
        for side in (case.src, case.dst):
            require_checkable(side.layout, NotAvailable)
        if (case.transport, case.memory) == ("shm", "private") and options.engine != "auto":
            raise NotAvailable(f"no engine {options.engine} for private memory; only auto")
        num_copying = len((case.src if case.op is Op.PUT else case.dst).ranks)
        num_threads = options.num_threads or max(default_num_threads() // num_copying, 1)
        with RankRig(case, self._team, num_threads=num_threads, devices=self._devices) as rig:
            return RankMeasurement(
                case,
                rig,
                tuning=Tuning(options.engine, case.num_sms),
                num_threads=num_threads,
                iters=options.iters,
                warmup=options.warmup,
                seed=options.seed,
                on_round=on_round,
            ).run()

    def _require_alive(self) -> None:
        self._team.require_alive()

    def _layouts_of(self, case: RankCase) -> tuple[str, str]:
        return describe_layout(case.src.layout), describe_layout(case.dst.layout)
