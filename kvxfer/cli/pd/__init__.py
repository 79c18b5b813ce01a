"""kvxfer pd: prefill and decode on separate engines: serve, measure, report, plan."""

import argparse
from importlib import import_module

from kvxfer.pd.launch.child import all_ended

_COMMANDS: tuple[str, ...] = (
    "up",
    "proxy",
    "bench",
    "experiment",
    "report",
    "plan",
    "profile",
    "advise",
    "validate",
    "demo",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the sub-commands, one module of this package each."""
    commands = parser.add_subparsers(dest="pd_command", required=True, metavar="COMMAND")
    for name in _COMMANDS:
        module = import_module(f"kvxfer.cli.pd.{name}")
        summary = (module.__doc__ or "").strip().splitlines()[0].split(": ", 1)[-1]
        command = commands.add_parser(
            name, help=summary, description=summary, formatter_class=parser.formatter_class
        )
        command.set_defaults(run_pd=module.run, parser=command)
        module.add_arguments(command)


def run(args: argparse.Namespace) -> int:
    """Run the sub-command; returns its exit status."""
    with all_ended():
        status: int = args.run_pd(args)
    return status
