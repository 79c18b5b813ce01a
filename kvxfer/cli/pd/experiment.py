"""kvxfer pd experiment: some of the articles' experiments, measured or simulated."""

import argparse
import functools
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvxfer.cli.output import show, write
from kvxfer.cli.pd import load_options, plan_options, stack_options
from kvxfer.cli.pd.bench_watch import watchers
from kvxfer.cli.pd.model_options import require_steps_of
from kvxfer.cli.pd.status_line import StatusLine
from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.pd.analysis import parse_objectives
from kvxfer.pd.experiment_result import (
    RESULT_FILE,
    ExperimentResult,
    load_result,
    save_result,
)
from kvxfer.pd.experiments.base import Experiment
from kvxfer.pd.experiments.context import Context
from kvxfer.pd.experiments.options import SIZES, Options, Size
from kvxfer.pd.experiments.registry import find_experiment, names
from kvxfer.pd.experiments.together import measure_together
from kvxfer.pd.launch.launcher import Launcher
from kvxfer.pd.launch.scratch import Scratch, scratch_folder
from kvxfer.pd.load.plan import parse_tokens
from kvxfer.pd.planner.figures import find_engine
from kvxfer.pd.planner.same_model import Model
from kvxfer.report.experiment_page import write_report
from kvxfer.report.experiment_table import print_experiment

_EXIT_CHECK_FAILED: Final = 1
_EXIT_INTERRUPTED: Final = 130
_OUT: Final = "pd-experiments"
_PIPE_COLUMNS: Final = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    _add_question(parser.add_argument_group("what is asked"))
    _add_sources(parser.add_argument_group("where figures come from"))
    load_options.add_arguments(parser)
    stack_options.add_arguments(parser)
    parser.set_defaults(model=None)


def _add_question(what: argparse._ActionsContainer) -> None:
    what.add_argument(
        "name",
        nargs="*",
        metavar="NAME",
        help=f"{', '.join(names())}; several start the set-ups that they share once",
    )
    what.add_argument("--list", action="store_true", help="say what each experiment asks")
    what.add_argument(
        "--size",
        choices=SIZES,
        default="cpu",
        help="set-ups and load for a CPU with the tiny model, or for GPUs",
    )
    what.add_argument(
        "--quick",
        action="store_true",
        help="as --size quick: some minutes on a CPU, to see that all works",
    )
    what.add_argument(
        "--out",
        default=_OUT,
        metavar="DIR",
        help="DIR/NAME gets runs, record, page and drawings; a run resumes there",
    )
    what.add_argument(
        "--setup",
        action="append",
        metavar="NAME=KIND[,KEY=VALUE...]",
        help="instead of the experiment's own, as `kvxfer pd bench` has it",
    )
    what.add_argument(
        "--hits", metavar="N,...", help="of kv-reuse: tokens of a prompt that are there, as 0,1k"
    )
    what.add_argument("--slo", metavar="KEY:MS,...", help="as `kvxfer pd report` has it")


def _add_sources(source: argparse._ActionsContainer) -> None:
    source.add_argument(
        "--records",
        nargs="+",
        default=[],
        metavar="DIR",
        help="what `kvxfer pd bench --out` wrote, instead of measuring",
    )
    source.add_argument(
        "--simulate", action="store_true", help="measure nothing; only what the planner simulates"
    )
    source.add_argument(
        "--engine-figures",
        metavar="NAME|FILE",
        help="of the simulated engine: a name that comes with kvxfer, or of `kvxfer pd profile`",
    )
    source.add_argument(
        "--sweep", nargs="+", default=[], metavar="FILE", help="records of `kvxfer sweep --json`"
    )
    plan_options.add_row_arguments(source)


def run(args: argparse.Namespace) -> int:
    """Conduct experiments; print their findings, write record, page and drawings of each.

    Returns:
        1 where something failed or spoils the figures, 130 after Ctrl-C (what was measured is
        kept), else 0.

    Raises:
        InvalidUsage: an option is wrong, or the experiment cannot be done with it.
        NotAvailable: no vLLM, where something has to be measured.
    """
    if args.list or not args.name:
        for name in names():
            write(f"{name}: {find_experiment(name).question}\n")
        return 0
    experiments = [find_experiment(name) for name in dict.fromkeys(args.name)]
    out = Path(args.out)
    with scratch_folder(stack_options.kept_logs(args)) as scratch, StatusLine() as line:
        launcher = functools.cache(lambda model: _launcher(args, model, scratch))
        pairs = [(one, _context(args, one, out / one.name, launcher, line)) for one in experiments]
        try:
            results = _conduct(pairs, line)
        except KeyboardInterrupt:
            line.say(f"interrupted; the same command goes on with what {out} lacks")
            return _EXIT_INTERRUPTED
        finally:
            line.close()
        scratch.has_failed = any(context.failures for _, context in pairs)
        return max(_report(result, out / result.name, line) for result in results)


def _conduct(
    pairs: Sequence[tuple[Experiment, Context]], line: StatusLine
) -> list[ExperimentResult]:
    """One after the other; each is written down before the next begins."""
    sharing = [context for one, context in pairs if one.shares_setups and context.how == "measured"]
    if len(sharing) > 1:
        measure_together(sharing)
    results = []
    for one, context in pairs:
        results.append(one.run(context))
        older = _replaced(context)
        if older:
            line.say(f"{one.name}: replaces the result of {older}")
        save_result(context.out, results[-1])
    return results


def _replaced(context: Context) -> str:
    """What another command left in the folder, in words; empty where there is nothing of it."""
    path = context.out / RESULT_FILE
    if not path.exists():
        return ""
    try:
        older = load_result(path)
    except InvalidUsage:
        return f"{path}, which cannot be read"
    command = older.commands[0] if older.commands else "an unknown command"
    return "" if command == shlex.join(context.command) else f"{older.made_at}, {command}"


def _launcher(args: argparse.Namespace, model: str, scratch: Scratch) -> Launcher:
    return stack_options.launcher(argparse.Namespace(**{**vars(args), "model": model}), scratch)


def _context(
    args: argparse.Namespace,
    experiment: Experiment,
    folder: Path,
    launcher: Callable[[str], Launcher],
    line: StatusLine,
) -> Context:
    size: Size = "quick"
    if not args.quick:
        size = args.size
    options = _options(args, experiment.sizes[size])
    if args.simulate and args.model is not None and options.engine:
        figures = find_engine(options.engine).model
        require_steps_of(figures, Model.named(args.model), "--engine-figures")
    if args.records and args.simulate:
        raise InvalidUsage("--records and --simulate: give one of them")
    return Context(
        out=folder,
        size=size,
        options=options,
        command=_command(),
        make_launcher=lambda: launcher(options.model),
        records=tuple(map(Path, args.records)),
        simulate_only=args.simulate,
        watchers=watchers(line),
        point_timeout_s=load_options.point_timeout_s(args),
    )


def _options(args: argparse.Namespace, base: Options) -> Options:
    """Those of the experiment, with what the caller gives in their place."""
    found = replace(base, load=load_options.parse(args, base.load))
    if args.model is not None:
        found = replace(found, model=args.model)
    if args.setup:
        found = replace(found, setups=tuple(args.setup))
    if args.hits is not None:
        found = replace(found, hits=parse_tokens("--hits", args.hits.split(",")))
    if args.slo is not None:
        parse_objectives(args.slo)
        found = replace(found, slo=args.slo)
    if args.engine_figures is not None:
        found = replace(found, engine=args.engine_figures)
    if args.sweep:
        sweeps = tuple(map(Path, args.sweep))
        found = replace(found, sweeps=sweeps, sweep_rows=plan_options.rows_of(args))
    else:
        plan_options.refuse_row_options(args)
    told = stack_options.engine_args(args)
    return replace(
        found,
        prefill_args=(*found.prefill_args, *told["prefill_args"]),
        decode_args=(*found.decode_args, *told["decode_args"]),
    )


def _command() -> tuple[str, ...]:
    return ("kvxfer", *sys.argv[1:])


def _report(result: ExperimentResult, folder: Path, line: StatusLine) -> int:
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    show(
        lambda console: print_experiment(result, console),
        width=None if on_terminal else _PIPE_COLUMNS,
    )
    try:
        write(f"{shlex.quote(str(write_report(result, folder)))}\n")
    except NotAvailable as error:
        line.say(f"no page: {error}")
    return _EXIT_CHECK_FAILED if result.faults else 0
