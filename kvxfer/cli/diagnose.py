"""kvxfer diagnose: whether this node moves KV caches as fast as it should; if not, why.

Exit status: 0 all is well; 1 a finding; 2 wrong usage; 3 there is nothing to test.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console

from kvxfer.cli.output import show
from kvxfer.diagnose.compare import read_report
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
    parser.add_argument("--compare", metavar="OLD.json", help="what changed since that report")
    parser.add_argument("--json", metavar="FILE", help="everything, schema kvxfer.diagnose/1")
    parser.add_argument("--html", metavar="FILE", help="one page with heat maps and topology")
    parser.add_argument(
        "--prometheus", metavar="FILE", help="metrics for the node exporter's textfile collector"
    )


def run(args: argparse.Namespace) -> int:
    """Diagnose, print, and write the files that were asked for."""
    if (args.quick or args.gentle) and (args.folder or args.capture):
        raise InvalidUsage("--quick and --gentle are of measurements; a capture has none")
    outputs = [path for path in (args.json, args.html, args.prometheus) if path is not None]
    for path in outputs:
        require_writable(path)
    require_different(outputs)
    older = None if args.compare is None else read_report(args.compare)
    report = _report(args, older)
    if args.json is not None:
        text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
        write_file(args.json, text + "\n")
    if args.html is not None:
        write_file(args.html, to_html(report))
    if args.prometheus is not None:
        write_prometheus(args.prometheus, report)
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    show(
        lambda console: print_diagnosis(report, console),
        width=None if on_terminal else _PIPE_COLUMNS,
    )
    return status_of(report)


def status_of(report: DiagnoseReport) -> int:
    """The exit status of a report."""
    if report.has_finding:
        return EXIT_FINDING
    return EXIT_NOTHING if report.verdict is Verdict.NOT_APPLICABLE else EXIT_OK


def _report(args: argparse.Namespace, older: DiagnoseReport | None) -> DiagnoseReport:
    if args.folder is not None:
        return diagnose_folder(Path(args.folder), older=older)
    if args.capture is not None:
        return capture(Path(args.capture), older=older)
    effort = QUICK if args.quick else GENTLE if args.gentle else FULL
    with _progress() as tell:
        return diagnose(effort=effort, older=older, tell=tell)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line on a terminal that says what is measured now."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    with Console(stderr=True).status("starting") as status:
        yield status.update
