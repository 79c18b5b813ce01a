"""kvxfer pd advise: does a running set-up keep its objectives, and what to change next."""

import argparse
import sys
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from kvxfer.cli.model_side import whole_number
from kvxfer.cli.output import show
from kvxfer.cli.pd import plan_options
from kvxfer.cli.pd.status_line import StatusLine
from kvxfer.errors import InvalidUsage
from kvxfer.pd.advise.advice import Advice, Outcome, advise
from kvxfer.pd.advise.changes import Basis, Predicted
from kvxfer.pd.advise.reading import watch
from kvxfer.pd.advise.record import advice_json
from kvxfer.pd.advise.targets import parse_targets
from kvxfer.pd.numerals import decimal
from kvxfer.pd.planner.figures import find_engine
from kvxfer.report.export import require_writable, write_file
from kvxfer.units import format_number

_PIPE_COLUMNS: Final = 120
_MOST_INTERVAL_S: Final = 86_400.0
_EXITS: Final[dict[Outcome, int]] = {"holds": 0, "broken": 1, "unclear": 3, "idle": 3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    server = parser.add_argument_group("what is judged")
    server.add_argument(
        "--metrics",
        required=True,
        metavar="URL",
        help="of kvxfer pd proxy, or of a vLLM engine that does both",
    )
    server.add_argument(
        "--slo",
        required=True,
        metavar="KEY:pNN:MS,...",
        help="percentiles over all requests: ttft:p99:500,itl:p99:30; first_gap, tpot, e2el; mean",
    )
    server.add_argument(
        "--interval", default="30", metavar="S", help="seconds between the two readings"
    )
    plan_options.add_cost_arguments(parser, engine_required=False, model_required=False)
    known = parser.add_argument_group("what the metrics do not tell of the set-up")
    for name, default, text in (
        ("prefill-tp", "1", "GPUs of a prefill engine, or of one that does both"),
        ("decode-tp", "1", "GPUs of a decode engine"),
        ("budget", "8192", "most tokens of a step (--max-num-batched-tokens)"),
        ("max-seqs", "256", "requests that an engine runs"),
    ):
        known.add_argument(f"--{name}", default=default, metavar="N", help=text)
    parser.add_argument("--json", metavar="FILE", help="everything: kvxfer.pd.advice/1")


def run(args: argparse.Namespace) -> int:
    """Read the metrics twice, and print targets, load and what to change.

    Returns:
        0 where every target holds, 1 where one is broken, 3 where none can be seen broken and not
        all can be seen to hold, as without load.

    Raises:
        InvalidUsage: an option is wrong.
        NotAvailable, PeerLost, ProtocolMismatch, TransferFailed: the metrics cannot be read.
    """
    if args.json is not None:
        require_writable(args.json)
    targets = parse_targets(args.slo)
    basis = _basis(args)
    interval_s = _seconds(args.interval)
    with StatusLine() as line:
        seen = watch(args.metrics, interval_s, told=line.show)
        if basis is not None:
            line.show("simulating changes")
        found = advise(seen, targets, basis)
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    show(lambda console: _print(found, console), width=None if on_terminal else _PIPE_COLUMNS)
    if args.json is not None:
        write_file(args.json, advice_json(found))
    return _EXITS[found.outcome]


def _basis(args: argparse.Namespace) -> Basis | None:
    if args.engine is None:
        if args.sweep:
            raise InvalidUsage("--sweep is for predictions; give --engine and --model too")
        plan_options.refuse_row_options(args)
        return None
    if args.model is None:
        raise InvalidUsage("--engine is for predictions; give --model, whose KV moves, too")
    return Basis(
        models=plan_options.models_of(args, find_engine(args.engine)),
        prefill_tp=whole_number("--prefill-tp", args.prefill_tp, 1, 1024),
        decode_tp=whole_number("--decode-tp", args.decode_tp, 1, 1024),
        token_budget=whole_number("--budget", args.budget, 1, 1 << 20),
        max_num_seqs=whole_number("--max-seqs", args.max_seqs, 1, 1 << 20),
    )


def _seconds(text: str) -> float:
    seconds = decimal(text)
    if not 0 < seconds <= _MOST_INTERVAL_S:
        raise InvalidUsage(f"--interval: {text!r} is no number of seconds; use 0 < s <= 86400")
    return seconds


def _print(found: Advice, console: Console) -> None:
    seen = found.seen
    _line(
        console,
        f"{seen.requests_per_s:.3g} requests a second, {seen.in_flight:.3g} at once, "
        f"in {seen.seconds:.3g} s",
        "dim",
    )
    for stage in seen.stages:
        busy = "" if stage.busy is None else f", {stage.busy:.0%} of the time"
        work = "with prompts in prefill" if stage.role == "engine" else "with work"
        plural = "" if stage.num_engines == 1 else "s"
        kind = "engine" if stage.role == "engine" else f"{stage.role} engine"
        _line(
            console,
            f"{stage.num_engines} {kind}{plural}: "
            f"{stage.in_flight:.3g} requests at once{busy and f'{busy} {work}'}",
            "dim",
        )
    table = Table(box=box.SIMPLE)
    for name in ("target", "limit", "measured", "values", "verdict"):
        table.add_column(name, justify="left" if name in ("target", "verdict") else "right")
    for one in found.judged:
        table.add_row(
            one.target.name,
            f"{one.target.limit_ms:g} ms",
            one.words,
            f"{one.num_values}",
            one.verdict,
        )
    console.print(table)
    if found.present is not None:
        console.print(_predictions(found, found.present))
    _line(console, found.sentence, "bold")
    for text in found.remarks:
        _line(console, text, "dim")


def _predictions(found: Advice, present: Predicted) -> Table:
    table = Table(box=box.SIMPLE, title="predicted at this load", title_justify="left")
    table.add_column("change")
    table.add_column("GPUs", justify="right")
    for one in found.judged:
        table.add_column(f"{one.target.name}, ms", justify="right")
    table.add_column("")
    for predicted in (present, *found.tried):
        values = ("" if value != value else format_number(value) for value in predicted.values_ms)
        table.add_row(
            predicted.change.what or "(as it is)",
            f"{predicted.change.setup.num_gpus}",
            *values,
            f"not covered: {'; '.join(predicted.uncovered)}" if predicted.uncovered else "",
        )
    return table


def _line(console: Console, text: str, style: str) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
