"""What an experiment is given to work with; it measures as ``kvxfer pd bench`` does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from kvxfer.errors import InvalidUsage, KvxferError, NotAvailable
from kvxfer.pd.analysis import analyse
from kvxfer.pd.experiment_result import How
from kvxfer.pd.experiments.options import Options, Size
from kvxfer.pd.experiments.runs import joined
from kvxfer.pd.experiments.simulation import models_of, simulated_run
from kvxfer.pd.launch.launcher import Launcher
from kvxfer.pd.launch.spec import SetupSpec
from kvxfer.pd.load.measure import POINT_S, Bench
from kvxfer.pd.load.plan import LoadPlan
from kvxfer.pd.load.run import Watchers, run_setups
from kvxfer.pd.summary import RunSummary

RUN_FOLDER: Final = "run"


@dataclass(frozen=True, kw_only=True)
class Context:
    """One conduct of an experiment.

    Args:
        out: its own folder; runs that it measures lie in it, and go on where they were cut off.
        size: whose options were taken; ``options`` may differ from them by the caller's.
        command: the words that started it.
        make_launcher: makes what starts set-ups; called once, where something is measured.
        records: folders of runs of ``kvxfer pd bench``, taken instead of measuring.
        simulate_only: set-ups are simulated instead.
        watchers: told of progress.
        point_timeout_s: of one point.

    Attributes:
        failures: what could not be measured, a text each.
    """

    out: Path
    size: Size
    options: Options
    command: tuple[str, ...]
    make_launcher: Callable[[], Launcher]
    records: tuple[Path, ...] = ()
    simulate_only: bool = False
    watchers: Watchers = field(default_factory=Watchers)
    point_timeout_s: float = POINT_S
    failures: list[str] = field(default_factory=list, init=False)

    @cached_property
    def launcher(self) -> Launcher:
        """What starts set-ups, made when it is first asked for.

        Raises:
            InvalidUsage, NotAvailable: an option is wrong, or there is no vLLM.
        """
        return self.make_launcher()

    @property
    def how(self) -> How:
        """How `run` gets its figures."""
        if self.simulate_only:
            return "simulated"
        return "recorded" if self.records else "measured"

    def folders(self) -> tuple[Path, ...]:
        """Of the run or runs that `run` analyses."""
        return self.records or (self.out / RUN_FOLDER,)

    def run(self) -> RunSummary:
        """The options' set-ups under the options' load, or the records given in their place.

        Raises:
            InvalidUsage: nothing could be measured or simulated, or the records cannot be read.
            NotAvailable: there is no vLLM.
        """
        options = self.options
        if self.records:
            runs = [(path, analyse(path, objectives=options.objectives)) for path in self.records]
            return joined(runs)
        if self.simulate_only:
            return self.simulate(options.specs(), options.load)
        try:
            return self.measure(options.specs(), options.load)
        except NotAvailable as error:
            raise NotAvailable(
                f"{error}\nOr do without engines: --simulate, or --records DIR of `kvxfer pd bench`"
            ) from error

    def simulate(self, specs: Sequence[SetupSpec], load: LoadPlan) -> RunSummary:
        """Set-ups under a load, by the options' engine figures and sweeps.

        Raises:
            InvalidUsage: there are no figures, or they do not have a set-up's parallel size.
        """
        models = models_of(self.options)
        return simulated_run(specs, load, models, self.options.objectives)

    def bench(self, load: LoadPlan) -> Bench:
        """What measures points of ``load``.

        Raises:
            InvalidUsage, NotAvailable: as `launcher`.
        """
        launcher = self.launcher
        return Bench(
            plan=load,
            site=launcher.site,
            model=launcher.model,
            logs=launcher.logs,
            point_timeout_s=self.point_timeout_s,
        )

    def measure(
        self, specs: Sequence[SetupSpec], load: LoadPlan, name: str = RUN_FOLDER
    ) -> RunSummary:
        """Measure what the folder ``name`` in ``out`` lacks, and analyse all that it holds.

        A set-up or point that fails is told of in ``failures``, and the others are analysed.

        Raises:
            InvalidUsage: nothing may be measured, or not one point could be.
            NotAvailable: there is no vLLM.
        """
        if self.simulate_only:
            raise InvalidUsage("this has to be measured; leave --simulate out")
        folder = self.out / name
        told = replace(self.watchers, failed=self.failed)
        run_setups(specs, self.launcher, self.bench(load), folder, told)
        if self.failures and not any(folder.glob("*/*.point.json")):
            raise InvalidUsage(f"nothing could be measured; {self.failures[0]}")
        return analyse(folder, objectives=self.options.objectives)

    def failed(self, spec: SetupSpec, error: KvxferError) -> None:
        """Note what ended a set-up or a point early, and tell who watches."""
        self.failures.append(f"{spec.name}: {error}")
        self.watchers.failed(spec, error)
