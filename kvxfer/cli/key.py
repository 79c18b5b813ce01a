"""kvxfer key: make the key that workers on several hosts share."""

import argparse

from kvxfer.cli.output import write
from kvxfer.control import SharedKey


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.add_argument("file", metavar="FILE", help="where to write it; it must not exist yet")


def run(args: argparse.Namespace) -> int:
    """Write a new key that its owner alone can read; returns 0.

    Raises:
        InvalidUsage: the file exists or cannot be written.
        NotAvailable: this libzmq is built without CURVE.
    """
    SharedKey.create(args.file)
    write(f"{args.file}: a new key; give a copy to every host, readable by its owner alone\n")
    return 0
