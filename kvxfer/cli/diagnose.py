"""kvxfer diagnose: whether this node moves KV caches as fast as it should; if not, why.

Exit status: 0 all is well; 1 a finding; 2 wrong usage; 3 there is nothing to test, of which a
capture is none: it has written what it was asked for.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console

from kvxfer.cli.json_option import add_json, print_result, require_target
from kvxfer.cli.lists import positive
from kvxfer.diagnose.compare import read_report
from kvxfer.diagnose.inventory import require_capture
from kvxfer.diagnose.result import DiagnoseReport, Verdict
from kvxfer.diagnose.run import FULL, GENTLE, QUICK, capture, diagnose, diagnose_folder
from kvxfer.errors import InvalidUsage
from kvxfer.report.diagnose_html import to_html
from kvxfer.report.diagnose_prometheus import write_prometheus
from kvxfer.report.diagnose_table import print_diagnosis
from kvxfer.report.export import require_different, require_writable, write_file

EXIT_OK = 0
EXIT_FINDING = 1
EXIT_NOTHING = 3
_PIPE_COLUMNS = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="a first look, under 10 s on 8 GPUs")
    effort.add_argument(
        "--gentle", action="store_true", help="beside a live workload: 32 MiB of a GPU's memory"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--from", dest="folder", metavar="DIR", help="judge a folder of captured files instead"
    )
    source.add_argument(
        "--capture", metavar="DIR", help="write such a folder of this node; measures nothing"
    )
    parser.add_argument(
        "--expect-gpus",
        metavar="N",
        help="fewer are a finding, also where those that are missing left no trace",
    )
    parser.add_argument("--compare", metavar="OLD.json", help="what changed since that report")
    add_json(parser)
    parser.add_argument("--html", metavar="FILE", help="one page with heat maps and topology")
    parser.add_argument(
        "--prometheus", metavar="FILE", help="metrics for the node exporter's textfile collector"
    )


def run(args: argparse.Namespace) -> int:
    """Diagnose, print, and write the files that were asked for."""
    if (args.quick or args.gentle) and (args.folder or args.capture):
        raise InvalidUsage("--quick and --gentle are of measurements; a capture has none")
    if args.expect_gpus is not None:
        args.expect_gpus = positive("--expect-gpus")(args.expect_gpus)
    _require_targets(args)
    older = None if args.compare is None else read_report(args.compare)
    report = _report(args, older)
    if args.html is not None:
        write_file(args.html, to_html(report))
    if args.prometheus is not None:
        write_prometheus(args.prometheus, report)
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    print_result(
        args.json,
        lambda: msgspec.json.format(msgspec.json.encode(report), indent=2).decode(),
        lambda console: print_diagnosis(report, console),
        width=None if on_terminal else _PIPE_COLUMNS,
    )
    return status_of(report, is_capture=args.capture is not None)


def status_of(report: DiagnoseReport, *, is_capture: bool = False) -> int:
    """The exit status of a report, or of a capture, which is well where it is written."""
    if report.has_finding:
        return EXIT_FINDING
    nothing = report.verdict is Verdict.NOT_APPLICABLE and not is_capture
    return EXIT_NOTHING if nothing else EXIT_OK


def _require_targets(args: argparse.Namespace) -> None:
    require_target(args.json)
    files = [args.html, args.prometheus, None if args.json == "-" else args.json]
    outputs = [path for path in files if path is not None]
    for path in outputs:
        require_writable(path)
    require_different(outputs)


def _report(args: argparse.Namespace, older: DiagnoseReport | None) -> DiagnoseReport:
    if args.folder is not None:
        return diagnose_folder(Path(args.folder), older=older, expect_gpus=args.expect_gpus)
    if args.capture is not None:
        return _capture(args, older)
    effort = QUICK if args.quick else GENTLE if args.gentle else FULL
    with _progress() as tell:
        return diagnose(effort=effort, older=older, expect_gpus=args.expect_gpus, tell=tell)


def _capture(args: argparse.Namespace, older: DiagnoseReport | None) -> DiagnoseReport:
    folder = Path(args.capture)
    replaced = require_capture(folder)  # before the work, not after it
    report = capture(folder, older=older, expect_gpus=args.expect_gpus)
    in_place = ", in place of the capture that was there" if replaced else ""
    # Not among the results: those may be JSON, or what a capture says is judged alike anywhere.
    print(f"kvxfer: wrote the capture to {str(folder)!r}{in_place}", file=sys.stderr)
    return report


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line on a terminal that says what is measured now."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    with Console(stderr=True).status("starting") as status:
        yield status.update
