"""Several experiments in one sitting: a set-up that more than one of them has is started once.

An engine takes minutes to start, and a point often less than one. What is measured lies in each
experiment's own folder, as if it had been measured alone, so that each finds its points there.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from kvxfer.errors import KvxferError
from kvxfer.pd.experiments.context import RUN_FOLDER, Context
from kvxfer.pd.launch.spec import SetupSpec
from kvxfer.pd.load.measure import Bench
from kvxfer.pd.load.run import measure_stack, missing_points
from kvxfer.pd.result import PDPoint, require_folder


class _Wanted(NamedTuple):
    """What one experiment lacks of one set-up."""

    context: Context
    bench: Bench
    points: list[PDPoint]
    folder: Path


def measure_together(contexts: Sequence[Context]) -> None:
    """Measure what several experiments lack of the set-ups that they share.

    What fails here is told of by the experiment that wants it, which tries again by itself.

    Args:
        contexts: of experiments that measure their options' set-ups under their options' load.

    Raises:
        InvalidUsage: a folder holds another set-up of that name, or cannot be made or written.
        NotAvailable: there is no vLLM.
    """
    wanted: dict[tuple[SetupSpec, str], list[_Wanted]] = {}
    for context in contexts:
        bench = context.bench(context.options.load)
        for spec in context.options.specs():
            folder = context.out / RUN_FOLDER / spec.name
            points = missing_points(spec, context.launcher, bench, folder)
            if points and spec.url is None:
                one = _Wanted(context, bench, points, folder)
                wanted.setdefault((spec, context.options.model), []).append(one)
    shared = {key: several for key, several in wanted.items() if len(several) > 1}
    for one in chain.from_iterable(shared.values()):
        require_folder(one.folder)
    for (spec, _), several in shared.items():
        _measure(spec, several)


def _measure(spec: SetupSpec, wanted: Sequence[_Wanted]) -> None:
    context = wanted[0].context
    launcher, watchers = context.launcher, context.watchers
    try:
        with launcher.start(spec, watchers.starting(spec)) as stack:
            for one in wanted:
                measure_stack(
                    spec, one.points, stack, launcher, one.bench, one.folder, one.context.watchers
                )
    except KvxferError as error:
        watchers.failed(spec, error)
