"""kvxfer pd validate: what a plan would have said of measured runs, and how far off it is."""

import argparse
import sys
from pathlib import Path
from typing import Final

import msgspec

from kvxfer.cli.lists import parse_list
from kvxfer.cli.output import show
from kvxfer.cli.pd import plan_options
from kvxfer.cli.pd.model_options import require_records_of
from kvxfer.errors import InvalidUsage
from kvxfer.pd.planner.figures import find_engine
from kvxfer.pd.planner.profile_records import engine_of, read_points
from kvxfer.pd.planner.records import validation_json
from kvxfer.pd.planner.validate import validate
from kvxfer.report.export import require_writable, write_file
from kvxfer.report.planner_table import print_validation

_PIPE_COLUMNS: Final = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.add_argument("folder", metavar="DIR", help="what kvxfer pd bench --out wrote")
    parser.add_argument(
        "--fit",
        metavar="SETUP/POINT,...",
        help="instead of --engine: fit the costs to these points of DIR, and predict the others",
    )
    plan_options.add_cost_arguments(parser, engine_required=False)
    parser.add_argument("--json", metavar="FILE", help="kvxfer.pd.plan-validation/1")


def run(args: argparse.Namespace) -> int:
    """Predict every point of a run and print measured and predicted figures; returns 0.

    Raises:
        InvalidUsage: an option is wrong, the folder holds no run, or one of another model.
    """
    if (args.engine is None) == (args.fit is None):
        raise InvalidUsage("give --engine, or --fit with the points to fit the costs to")
    if args.json is not None:
        require_writable(args.json)
    points = read_points(Path(args.folder))
    fitted = parse_list("--fit", args.fit, str) if args.fit else ()
    engine = engine_of(points, fitted, source=args.folder) if fitted else find_engine(args.engine)
    models = plan_options.models_of(args, engine)
    require_records_of(points, engine.model, "--fit" if fitted else "--engine")
    found = validate(points, models, fitted=fitted)
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    show(
        lambda console: print_validation(found, console),
        width=None if on_terminal else _PIPE_COLUMNS,
    )
    if args.json is not None:
        facts = {"engine": msgspec.to_builtins(engine), "fitted": list(fitted)}
        write_file(args.json, validation_json(found, facts))
    return 0
