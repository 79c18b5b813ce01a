"""kvxfer pd: prefill and decode on separate engines: serve, measure, report, plan."""

import argparse

from kvxfer.cli.commands import add_commands
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
    add_commands(parser, "kvxfer.cli.pd", _COMMANDS, "run_pd")


def run(args: argparse.Namespace) -> int:
    """Run the sub-command; returns its exit status."""
    with all_ended():
        status: int = args.run_pd(args)
    return status
