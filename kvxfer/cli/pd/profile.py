"""kvxfer pd profile: the costs of an engine's steps, from a short measurement or from records."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvxfer.cli.lists import parse_list
from kvxfer.cli.model_side import whole_number
from kvxfer.cli.output import show, write
from kvxfer.cli.pd.model_options import require_records_of
from kvxfer.cli.pd.status_line import StatusLine
from kvxfer.errors import InvalidUsage
from kvxfer.layout.kv_layout import canonical_dtype
from kvxfer.pd.load.plan import parse_tokens
from kvxfer.pd.planner.engine_model import EngineModel, StepModel, engine_json, load_engine
from kvxfer.pd.planner.fit_check import FittedRow, fitted_rows, misfits
from kvxfer.pd.planner.profile_live import (
    BATCHES,
    CONTEXTS,
    PROMPTS,
    Profile,
    ProfilePlan,
    profile,
)
from kvxfer.pd.planner.profile_records import (
    Measured,
    profile_of,
    read_points,
    taken_of,
)
from kvxfer.pd.planner.profile_streams import Asker, kv_capacity_tokens, longest_request
from kvxfer.pd.planner.same_model import Model, relation
from kvxfer.report.export import require_writable, write_file
from kvxfer.report.planner_table import print_fit

_TIMEOUT_S: Final = 10.0  # of questions that engines answer at once
_MAX_SECONDS: Final = 86400
_MAX_TP: Final = 1024
_MAX_BATCH: Final = 512  # threads
_PIPE_COLUMNS: Final = 120
_EXIT_MISFIT: Final = 1
_REMEDIES: Final = {
    "url": "measure again while nothing else keeps engine and machine busy",
    "records": "take with --points what belongs together, or measure again on an idle machine",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.add_argument(
        "--url", help="http://HOST:PORT of an engine that runs, and does nothing else"
    )
    parser.add_argument(
        "--records", metavar="DIR", help="instead: what kvxfer pd bench --out wrote"
    )
    parser.add_argument(
        "--points", metavar="SETUP/POINT,...", help="of --records, as kvx/c4-i8192-o128 (all)"
    )
    parser.add_argument("--model", required=True, help="the name that the engine serves")
    parser.add_argument(
        "--out", required=True, metavar="FILE", help="the figures: kvxfer.pd.engine/1"
    )
    parser.add_argument(
        "--add", action="store_true", help="keep what --out holds of other TP sizes"
    )
    parser.add_argument("--name", help="of the engine (default: --url or --records)")
    parser.add_argument(
        "--tp", metavar="N", help="GPUs of that engine (default: 1, with --records theirs)"
    )
    parser.add_argument("--kv-dtype", default="bfloat16", help="of its cache")
    parser.add_argument("--seconds", default="120", metavar="S", help="most that is spent")
    parser.add_argument("--prompts", default=_words(PROMPTS), help="lengths of prompts")
    parser.add_argument("--batches", default=_words(BATCHES), help="requests that decode at once")
    parser.add_argument("--contexts", default=_words(CONTEXTS), help="lengths of their prompts")
    parser.add_argument("--token-budget", default="8192", metavar="N", help="most tokens of a step")


def run(args: argparse.Namespace) -> int:
    """Measure, fit, print what the fit leaves over, and write the figures.

    Returns:
        1 where a measured step is fitted far off (the figures are written all the same), else 0.

    Raises:
        InvalidUsage: an option is wrong, the records are of another model, or too little was
            measured for a fit.
        NotAvailable: the engine does not answer, or not within the time.
        TransferFailed: the engine refuses.
    """
    if (args.url is None) == (args.records is None):
        raise InvalidUsage("give --url of an engine, or --records of a benchmark")
    require_writable(args.out)
    out = Path(args.out)
    kv_dtype = canonical_dtype(args.kv_dtype)
    asked_tp = None if args.tp is None else whole_number("--tp", args.tp, 1, _MAX_TP)
    kept = _kept(out, args.model) if args.add else []
    if args.url is not None:
        found, capacity = _measured(args)
        tp_size = asked_tp or 1
    else:
        only = parse_list("--points", args.points, str) if args.points else None
        points = read_points(Path(args.records))
        found, capacity = profile_of(points, only), None
        require_records_of(points, args.model, "--model", only)
        tp_size = _recorded_tp(taken_of(points, only), asked_tp)
    steps = found.fit(tp_size, capacity)
    source = "url" if args.url else "records"
    engine = EngineModel(
        name=args.name or args.url or Path(args.records).resolve().name,
        model=args.model,
        source=f"kvxfer pd profile --{source}, {time.strftime('%Y-%m-%d', time.gmtime())}",
        steps=sorted(
            [*(one for one in kept if one.tp_size != tp_size), steps], key=lambda one: one.tp_size
        ),
        kv_dtype=kv_dtype,
        first_tokens_together=found.first_tokens_together,
    )
    rows = fitted_rows(steps, found.rows)
    status = _report(rows, found.warnings, out, _REMEDIES[source])
    write_file(args.out, engine_json(engine))
    if found.cut_off:
        write(f"the {args.seconds} s were up before all was asked; --seconds gives it more\n")
    write(f"besides steps a request takes {steps.request_s * 1e3:.3g} ms; wrote {out}\n")
    return status


def _kept(out: Path, model: str) -> list[StepModel]:
    """The steps of a file that is written again.

    Raises:
        InvalidUsage: it is not an engine's figures, or of another model.
    """
    if not out.exists():
        return []
    engine = load_engine(out)
    held, asked = Model.named(engine.model), Model.named(model)
    if relation(held, asked) == "other":
        raise InvalidUsage(
            f"{out} holds figures of {held}, and --model is {asked}; give another --out, or leave "
            "--add out to write it anew"
        )
    return engine.steps


def _recorded_tp(points: Sequence[Measured], asked: int | None) -> int:
    """The size that the records have, which is one.

    Raises:
        InvalidUsage: another one is asked for.
    """
    recorded = points[0].setup.prefill_tp
    if asked not in (None, recorded):
        raise InvalidUsage(
            f"--tp is {asked}, and the records are of TP {recorded}; leave --tp out, or give "
            f"records of TP {asked}"
        )
    return recorded


def _measured(args: argparse.Namespace) -> tuple[Profile, int | None]:
    seconds = whole_number("--seconds", args.seconds, 1, _MAX_SECONDS)
    end_s = time.monotonic() + seconds
    plan = ProfilePlan(
        prompts=sorted(parse_tokens("--prompts", args.prompts.split(","))),
        batches=sorted(
            parse_list(
                "--batches",
                args.batches,
                lambda text: whole_number("--batches", text, 1, _MAX_BATCH),
            )
        ),
        contexts=sorted(parse_tokens("--contexts", args.contexts.split(","))),
        token_budget=whole_number("--token-budget", args.token_budget, 1, 1 << 24),
        longest=longest_request(args.url, args.model, _TIMEOUT_S),
    )
    ask = Asker(args.url, args.model, lambda: end_s - time.monotonic())
    with StatusLine() as line:
        found = profile(ask, plan, line.show)
    return found, kv_capacity_tokens(args.url, _TIMEOUT_S)


def _report(rows: Sequence[FittedRow], warnings: Sequence[str], out: Path, remedy: str) -> int:
    """Write the fit, what it suffers from, and how to do better; returns the exit status."""
    cells = [
        (one.what, None if one.row.is_assumed else one.row.step_s, one.fitted_s) for one in rows
    ]
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    show(lambda console: print_fit(cells, console), width=None if on_terminal else _PIPE_COLUMNS)
    for text in warnings:
        write(f"warning: {text}\n")
    if any(one.row.is_assumed for one in rows):
        write(
            "assumed: not measured, but put in its place, since records of one length do not tell "
            "one cost from another; measure a second length with `kvxfer pd bench --isl`\n"
        )
    off = misfits(rows)
    if off:
        write(f"warning: {off}: plans on {out} are off as much; {remedy}\n")
    return _EXIT_MISFIT if off else 0


def _words(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))
