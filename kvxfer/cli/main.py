"""``kvxfer``: one program, one sub-command a room.

Exit status: 0 done; 1 a check failed; 2 wrong usage; 3 not available here; 130 interrupted, by
Ctrl-C or SIGTERM.
"""

import argparse
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import kvxfer
from kvxfer.cli.commands import add_commands
from kvxfer.errors import InvalidUsage, KvxferError, NotAvailable

EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_AVAILABLE = 3
EXIT_INTERRUPTED = 130

_INTERRUPTED = "kvxfer: interrupted before the first result"
_COMMANDS = ("sweep", "tune", "plan", "serve", "send", "pd", "diagnose", "key", "model", "env")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is False or action.default in (None, "", [], ()):
            return action.help
        return super()._get_help_string(action)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole program."""
    parser = argparse.ArgumentParser(
        prog="kvxfer",
        description="Move paged KV caches between prefill and decode workers, and measure it.",
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"kvxfer {kvxfer.__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more, to stderr")
    add_commands(parser, "kvxfer.cli", _COMMANDS, "run")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal shows ? for µ
    program = "kvxfer"
    try:
        # The command is imported here, not above: that takes long enough to be interrupted.
        with _signals(_leave, signal.SIGINT, signal.SIGTERM):
            args, unknown = build_parser().parse_known_args(argv)
        if unknown:  # the command's own usage helps more than the program's
            args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        program = args.parser.prog  # with its sub-commands, as in what argparse says
        logging.basicConfig(
            stream=sys.stderr,
            level=logging.INFO if args.verbose else logging.WARNING,
            format="kvxfer: %(levelname)s: %(message)s",
        )
        with _signals(signal.default_int_handler, signal.SIGTERM):
            status: int = args.run(args)
            return status
    except KeyboardInterrupt:
        print(_INTERRUPTED, file=sys.stderr)
        return EXIT_INTERRUPTED
    except KvxferError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return _status_of(error)


@contextmanager
def _signals(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Handle signals meanwhile; only the main thread may ask for that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once: some extension modules swallow an exception that comes amid their import."""
    os.write(2, f"{_INTERRUPTED}\n".encode())
    os._exit(EXIT_INTERRUPTED)


def _status_of(error: KvxferError) -> int:
    if isinstance(error, InvalidUsage):
        return EXIT_USAGE
    if isinstance(error, NotAvailable):
        return EXIT_NOT_AVAILABLE
    return EXIT_CHECK_FAILED


if __name__ == "__main__":
    sys.exit(main())
