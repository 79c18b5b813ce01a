"""kvxfer pd plan: which set-up of how many GPUs serves a load within objectives, and why."""

import argparse
import sys
from decimal import Decimal
from typing import Final

from kvxfer.cli.model_side import whole_number
from kvxfer.cli.output import show
from kvxfer.cli.pd import plan_options
from kvxfer.cli.pd.status_line import StatusLine
from kvxfer.errors import InvalidUsage
from kvxfer.pd.analysis import parse_objectives
from kvxfer.pd.numerals import decimal
from kvxfer.pd.planner.figures import find_engine
from kvxfer.pd.planner.predict import plan
from kvxfer.pd.planner.records import plan_json
from kvxfer.pd.planner.search import Named, candidates
from kvxfer.report.export import require_different, require_writable, write_file
from kvxfer.report.planner_page import plan_page, plan_picture
from kvxfer.report.planner_table import print_plan

_EXIT_UNMET: Final = 1
_PIPE_COLUMNS: Final = 140


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    plan_options.add_cost_arguments(parser, engine_required=True)
    plan_options.add_load_arguments(parser)
    plan_options.add_space_arguments(parser)
    goal = parser.add_argument_group("objectives")
    goal.add_argument(
        "--slo",
        metavar="KEY:MS,...",
        help="of each request: ttft:2000,itl:p99:30; itl:50 (longest gap), first_gap, tpot, e2el",
    )
    goal.add_argument(
        "--attained", default="90", metavar="PERCENT", help="of the requests that must be good"
    )
    out = parser.add_argument_group("output")
    out.add_argument("--top", default="6", metavar="N", help="set-ups shown of each number of GPUs")
    out.add_argument(
        "--each", action="store_true", help="a table a load, not of the heaviest alone"
    )
    out.add_argument("--json", metavar="FILE", help="everything: kvxfer.pd.plan/1")
    out.add_argument("--html", metavar="FILE", help="one page with CDFs; needs matplotlib")
    out.add_argument("--png", metavar="FILE", help="the CDFs; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    """Simulate every set-up and recommend one.

    Returns:
        1 where objectives are given and no set-up meets them at the heaviest load, else 0.

    Raises:
        InvalidUsage: an option is wrong, or no set-up can be simulated.
        NotAvailable: drawings are asked for without matplotlib.
    """
    outputs = [name for name in (args.json, args.html, args.png) if name is not None]
    for name in outputs:
        require_writable(name)
    require_different(outputs)
    most = whole_number("--top", args.top, 1, 1000)
    attained = _percent(args.attained)
    objectives = () if args.slo is None else parse_objectives(args.slo)
    models = plan_options.models_of(args, find_engine(args.engine))
    traces = plan_options.traces_of(args)
    setups = candidates(plan_options.space_of(args, models))
    with StatusLine() as line:

        def watch(one: Named, at: int) -> None:
            line.show(f"simulating {one.name} ({at + 1} of {len(setups)})", key="simulating")

        found = plan(setups, traces, models, objectives=objectives, attained=attained, watch=watch)
    loads = range(len(found.loads)) if args.each else [len(found.loads) - 1]
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    show(
        lambda console: print_plan(found, console, loads=loads, most=most),
        width=None if on_terminal else _PIPE_COLUMNS,
    )
    if args.json is not None:
        write_file(args.json, plan_json(found))
    if args.html is not None:
        write_file(args.html, plan_page(found))
    if args.png is not None:
        plan_picture(found, args.png)
    reached = max(one.serves(attained) for one in found.candidates)
    return _EXIT_UNMET if objectives and reached < len(found.loads) else 0


def _percent(text: str) -> float:
    if not 0.0 < decimal(text) <= 100.0:
        raise InvalidUsage(f"--attained: {text!r} is not a percentage above 0, to 100")
    return float(Decimal(text) / 100)  # of floats, 99.9 / 100 is more than 0.999
