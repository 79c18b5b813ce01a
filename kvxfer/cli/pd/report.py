"""kvxfer pd report: tables, drawings and a page of what kvxfer pd bench measured."""

import argparse
import re
import sys
from pathlib import Path

from kvxfer.cli.lists import parse_list, positive
from kvxfer.cli.output import show
from kvxfer.errors import InvalidUsage
from kvxfer.pd.analysis import analyse, parse_objectives
from kvxfer.report.export import require_writable, write_file
from kvxfer.report.pd_figures import DEFAULT_PERCENTILES
from kvxfer.report.pd_page import html_page, write_pictures
from kvxfer.report.pd_plots import plots
from kvxfer.report.pd_table import print_run

_PERCENTILE = re.compile(r"[0-9]{1,2}(?:\.[0-9]{1,4})?|100")
_PIPE_COLUMNS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.add_argument("folder", metavar="DIR", help="what kvxfer pd bench --out wrote")
    parser.add_argument(
        "--slo",
        metavar="KEY:MS,...",
        help="goodput: ttft:200,itl:50 (longest gap), itl:p99:30, first_gap:, tpot:, e2el:",
    )
    parser.add_argument(
        "--percentiles",
        default=",".join(f"{value:g}" for value in DEFAULT_PERCENTILES),
        metavar="P,...",
        help="0 to 100, as 50,90,99,99.5",
    )
    parser.add_argument(
        "--token-budget",
        metavar="N",
        help="most tokens of an engine's step, where a set-up's record does not say",
    )
    parser.add_argument("--html", metavar="FILE", help="one page with everything; needs matplotlib")
    parser.add_argument("--png", metavar="DIR", help="the drawings; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    """Analyse a run and write its report; returns 1 where a finding spoils figures, else 0.

    Raises:
        InvalidUsage: an argument is wrong, or the folder holds no run.
        NotAvailable: drawings are asked for without matplotlib.
    """
    if args.html is not None:
        require_writable(args.html)
    objectives = () if args.slo is None else parse_objectives(args.slo)
    percentiles = parse_list("--percentiles", args.percentiles, _percentile)
    budget = None if args.token_budget is None else positive("--token-budget")(args.token_budget)
    folder = Path(args.folder)
    found = analyse(folder, objectives=objectives, token_budget=budget)
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    show(
        lambda console: print_run(found, console, percentiles=percentiles),
        width=None if on_terminal else _PIPE_COLUMNS,
    )
    drawings = list(plots(found)) if args.html is not None or args.png is not None else []
    if args.html is not None:
        title = f"Prefill and decode: {folder.resolve().name}"
        page = html_page(found, drawings, title=title, percentiles=percentiles)
        write_file(args.html, page)
    if args.png is not None:
        write_pictures(drawings, Path(args.png))
    return 1 if found.failed else 0


def _percentile(text: str) -> float:
    if _PERCENTILE.fullmatch(text) is None:
        raise InvalidUsage(f"--percentiles: {text!r} is not a number from 0 to 100")
    return float(text)
