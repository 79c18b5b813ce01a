"""kvxfer pd demo: prefill and decode as two real vLLM engines on this machine, in minutes."""

import argparse
import textwrap
import time
from dataclasses import asdict
from pathlib import Path
from typing import Final

from kvxfer.cli.output import write
from kvxfer.cli.pd import report, stack_options
from kvxfer.cli.pd.bench_watch import watchers
from kvxfer.cli.pd.status_line import StatusLine
from kvxfer.errors import NotAvailable
from kvxfer.pd.client import Answer
from kvxfer.pd.demo.handover import Handover
from kvxfer.pd.demo.run import Shown, demo_model, run_demo
from kvxfer.pd.launch import python_site
from kvxfer.pd.launch.launcher import Launcher
from kvxfer.pd.launch.scratch import scratch_folder

_EXIT_CHECK_FAILED: Final = 1
_EXIT_INTERRUPTED: Final = 130
_COLUMNS: Final = 96


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.add_argument("--out", default="pd-demo", metavar="DIR", help="records and report.html")
    parser.add_argument("--python", metavar="PROGRAM", help="the Python that has vLLM (this one)")
    parser.add_argument("--logs", metavar="DIR", help="keep logs there (a scratch folder)")
    stack_options.add_addresses(parser)


def run(args: argparse.Namespace) -> int:
    """Start two engines and a proxy, answer a prompt, put a small load on them, and report.

    Returns:
        1 where a point failed or a finding spoils figures, 130 after Ctrl-C, else 0.

    Raises:
        InvalidUsage: a port is out of range.
        NotAvailable: no vLLM.
        PeerLost: a program ended; with the last lines of its log.
    """
    began_s = time.monotonic()
    out = Path(args.out)
    bound = stack_options.addresses(args)
    site = python_site.look(args.python)
    with scratch_folder(stack_options.kept_logs(args)) as scratch, StatusLine() as line:
        line.show("preparing the model")
        model, why = demo_model(site, scratch.models)
        write(f"model: {model.name}, {why}\n")
        launcher = Launcher(site=site, model=model, logs=scratch.logs, **bound)
        try:
            failures = run_demo(launcher, out, watchers(line), lambda shown: write(words(shown)))
        except KeyboardInterrupt:
            return _EXIT_INTERRUPTED
        scratch.has_failed = bool(failures)
    status = _report(out)
    write(f"done in {time.monotonic() - began_s:.0f} s\n")
    return _EXIT_CHECK_FAILED if failures else status


def words(shown: Shown) -> str:
    """The prompt's end, the answer, and the time of the hand-over."""
    found = shown.asked
    answer = textwrap.shorten(found.answer.text, 4 * _COLUMNS)
    return (
        f"prompt: ... {shown.prompt[-_COLUMNS:].strip()!r}\n"
        f"answer of the decode engine: {answer!r}\n"
        + (_untimed(found.answer) if found.handover is None else _timed(found.handover))
    )


def _timed(found: Handover) -> str:
    ms = {name: time_s * 1e3 for name, time_s in asdict(found).items()}
    line = (
        f"hand-over {ms['total_s']:.1f} ms = (TTFT {ms['ttft_s']:.1f} - prefill alone "
        f"{ms['alone_s']:.1f}) + (first gap {ms['first_gap_s']:.1f} - median gap "
        f"{ms['gap_s']:.1f}); medians, ms\n"
    )
    if found.is_told_apart:
        return line
    return (
        f"{line}  note: not told apart from this machine's noise: single hand-overs took "
        f"{ms['least_s']:.1f} to {ms['most_s']:.1f} ms\n"
    )


def _untimed(answer: Answer) -> str:
    what = "the answer" if answer.num_tokens is None else f"{answer.num_tokens} tokens"
    messages = "one message" if answer.num_messages == 1 else f"{answer.num_messages} messages"
    return (
        f"no time of the hand-over: {what} came in {messages}, which hides the gaps between "
        "tokens; run it again when the machine has less to do\n"
    )


def _report(out: Path) -> int:
    """`kvxfer pd report`, with a page where there is matplotlib."""
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    page = out / "report.html"
    try:
        status = report.run(parser.parse_args([str(out), "--html", str(page)]))
        write(f"page: {page}\n")
        return status
    except NotAvailable as error:
        status = report.run(parser.parse_args([str(out)]))
        write(f"no page: {error}\n")
        return status
