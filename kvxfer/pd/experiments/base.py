"""What an experiment is: a question, options for each size, and how it is done."""

import platform
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

import msgspec

from kvxfer.pd.experiment_result import ExperimentResult
from kvxfer.pd.experiments.context import Context
from kvxfer.pd.experiments.options import Options, Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One experiment.

    Args:
        name: on the command line.
        question: that it answers.
        sizes: its options, a set for each size.
        conduct: does it; what `run` adds need not be in its result.
        measures: whether engines are started, or records of runs read.
        shares_setups: whether all that it starts are its options' set-ups, each for its options'
            load: `kvxfer.pd.experiments.together` may have measured them.
    """

    name: str
    question: str
    sizes: Mapping[Size, Options]
    conduct: Callable[[Context], ExperimentResult]
    measures: bool = True
    shares_setups: bool = False

    def run(self, context: Context) -> ExperimentResult:
        """Conduct it, and add command, machine, time and failures.

        Raises:
            KvxferError: it cannot be done; what was measured stays in the context's folder.
        """
        found = self.conduct(context)
        machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
        return msgspec.structs.replace(
            found,
            commands=[shlex.join(context.command), *found.commands],
            environment={"analysed on": machine, **found.environment},
            faults=[*context.failures, *found.faults],
            made_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
