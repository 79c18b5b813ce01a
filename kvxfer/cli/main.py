"""``kvxfer``: one program, one sub-command a room.

Exit status: 0 done; 1 a check failed; 2 wrong usage; 3 not available here; 130 interrupted.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from types import ModuleType

import kvxfer
from kvxfer.cli import env, model, sweep
from kvxfer.errors import InvalidUsage, KvxferError, NotAvailable

EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_AVAILABLE = 3
EXIT_INTERRUPTED = 130

_COMMANDS: dict[str, ModuleType] = {"sweep": sweep, "env": env, "model": model}


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole program."""
    parser = argparse.ArgumentParser(
        prog="kvxfer",
        description="Move paged KV caches between prefill and decode workers, and measure it.",
    )
    parser.add_argument("--version", action="version", version=f"kvxfer {kvxfer.__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more, to stderr")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        summary = (module.__doc__ or "").strip().splitlines()[0].split(": ", 1)[-1]
        module.add_arguments(
            commands.add_parser(
                name,
                help=summary,
                description=summary,
                formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            )
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if args.verbose else logging.WARNING,
        format="kvxfer: %(levelname)s: %(message)s",
    )
    try:
        status: int = _COMMANDS[args.command].run(args)
        return status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except KvxferError as error:
        print(f"kvxfer {args.command}: {error}", file=sys.stderr)
        return _status_of(error)


def _status_of(error: KvxferError) -> int:
    if isinstance(error, InvalidUsage):
        return EXIT_USAGE
    if isinstance(error, NotAvailable):
        return EXIT_NOT_AVAILABLE
    return EXIT_CHECK_FAILED


if __name__ == "__main__":
    sys.exit(main())
