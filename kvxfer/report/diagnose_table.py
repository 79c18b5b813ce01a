"""A diagnosis on a terminal: what is wrong first, then the matrix, then what is well."""

import re
from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvxfer.diagnose.facts import Facts
from kvxfer.diagnose.figures import (
    BOTH_WAYS,
    CROWD_KINDS,
    ENGINE,
    HOST_DEVICE_KINDS,
    HOST_KINDS,
    KERNEL,
    LATENCY,
    NIC_KINDS,
    PAGED,
    Figure,
    Figures,
    gpu_name,
)
from kvxfer.diagnose.result import CheckResult, DiagnoseReport, Verdict

_STYLES = {
    Verdict.FAIL: "bold red",
    Verdict.WARN: "yellow",
    Verdict.PASS: "green",
    Verdict.NOT_APPLICABLE: "dim",
}
_MATRICES = (
    (ENGINE, "GB/s, one contiguous copy by the copy engine"),
    (KERNEL, "GB/s, the same by all SMs"),
    (PAGED, "GB/s, shuffled pages of 16 KiB by eight SMs"),
    (BOTH_WAYS, "GB/s, both ways at once, the sum"),
    (LATENCY, "ns, one read by the row of the column"),
)
_NUMBERS = ("GB/s", "limit", "of limit")
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# Findings of a check that are shown; the JSON has all.
_MOST_FINDINGS = 8


def print_diagnosis(report: DiagnoseReport, console: Console) -> None:
    """Write all of it."""
    _line(console, f"\n{summary_of(report)}")
    for result in report.checks:
        if result.findings:
            _print_findings(result, console)
    for kind, title in _MATRICES:
        _print_matrix(report, kind, title, console)
    _print_rates(report.figures, console)
    _print_rest(report.checks, console)
    for change in report.changes:
        word = "worse" if change.worse else "changed"
        _line(console, f"{word}: {change.what}: {change.before} -> {change.after}")


def summary_of(report: DiagnoseReport) -> str:
    """The node and the verdict, in a line."""
    counts = [
        f"{count} {verdict.value}"
        for verdict in reversed(Verdict)
        if (count := sum(result.verdict is verdict for result in report.checks))
    ]
    return (
        f"{describe_node(report.facts)}: {report.verdict.value} ({', '.join(counts)}) "
        f"in {report.elapsed_s:.1f} s"
    )


def describe_node(facts: Facts) -> str:
    """``2 x NVIDIA H200, 18 NVLinks each``, or why there is none, and the CPUs."""
    gpus = facts.gpus or ()
    if not gpus:
        parts = [_no_gpu(facts), _cpus(facts), f"{len(facts.hardware_nics)} RDMA devices"]
        return ", ".join(filter(None, parts))
    names = "/".join(sorted({gpu.name or "GPU" for gpu in gpus}))
    links = sorted({len(gpu.active_links) for gpu in gpus})
    text = f"{len(gpus)} x {names}, {'/'.join(map(str, links))} NVLinks each"
    return f"{text}, {len(facts.hardware_nics)} RDMA devices"


def _no_gpu(facts: Facts) -> str:
    host = facts.host
    if host.gpu_pcis:
        unusable = host.nvml_reason or host.driver == ""  # else nobody asked NVML
        words = "none of them usable" if unusable else "no more known of them"
        return f"{len(host.gpu_pcis)} GPUs on the PCI bus, {words}"
    return "no GPU here" if () in (facts.gpus, facts.host.gpu_pcis) else "no GPU known of"


def _cpus(facts: Facts) -> str:
    """Those that the process might use; of older captures, those of the node."""
    count = facts.host.num_cpus or sum(len(node.cpus) for node in facts.host.numa_nodes)
    return f"{count} CPUs" if count else ""


def cell_of(figure: Figure | None) -> str:
    """A figure in a matrix: wrong bytes and failures in place of rates."""
    if figure is None:
        return "-"
    if figure.error:
        return "ERROR"
    if figure.num_wrong:
        return "WRONG"
    if figure.latency_ns is not None:
        return f"{figure.latency_ns:.0f}"
    return "-" if figure.gb_per_s is None else f"{figure.gb_per_s:.1f}"


def _print_findings(result: CheckResult, console: Console) -> None:
    style = _STYLES[result.verdict]
    console.print(Text(f"\n{result.verdict.value}  {result.check}: {result.title}?", style=style))
    for finding in result.findings[:_MOST_FINDINGS]:
        _line(console, f"  {finding.where}: {finding.evidence}")
        _line(console, f"    likely cause: {finding.cause}")
        _line(console, f"    remedy: {finding.remedy}")
    more = len(result.findings) - _MOST_FINDINGS
    if more > 0:
        _line(console, f"  and {more} more; --json has all of them")


def _print_matrix(report: DiagnoseReport, kind: str, title: str, console: Console) -> None:
    if not report.figures.of(kind):
        return
    names = [gpu_name(gpu.index) for gpu in report.facts.gpus or ()]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("from \\ to", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for src in names:
        cells = [cell_of(report.figures.get(kind, src, dst)) for dst in names]
        table.add_row(src, *cells)
    _line(console, f"\n{title}")
    console.print(table)


def _print_rates(figures: Figures, console: Console) -> None:
    shown = figures.of(*CROWD_KINDS, *HOST_DEVICE_KINDS, *HOST_KINDS, *NIC_KINDS)
    if not shown:
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("what", "from", "to", "GB/s", "limit", "of limit", "limit is"):
        justify: Literal["left", "right"] = "right" if name in _NUMBERS else "left"
        table.add_column(name, justify=justify)
    for figure in shown:
        fraction, limit = figure.fraction_of_limit, figure.limit_gb_per_s
        table.add_row(
            figure.kind,
            Text(_plain(figure.src)),
            Text(_plain(figure.dst)),
            cell_of(figure),
            "" if limit is None else f"{limit:.1f}",
            "" if fraction is None else f"{fraction:.0%}",
            figure.limit_source,
        )
    console.print(table)


def _print_rest(results: Sequence[CheckResult], console: Console) -> None:
    """What is well, a line each; of what does not apply, a line for each reason."""
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    absent: dict[str, list[str]] = {}
    for result in results:
        if result.verdict is Verdict.PASS:
            word = Text(result.verdict.value, style=_STYLES[result.verdict])
            table.add_row(word, result.check, Text(_plain(result.evidence)))
        elif not result.findings:
            absent.setdefault(result.evidence, []).append(result.check)
    console.print(table)
    for reason, checks in absent.items():
        text = f"N/A  {_plain(reason)} ({', '.join(checks)})"
        console.print(Text(text, style=_STYLES[Verdict.NOT_APPLICABLE]))


def _line(console: Console, text: str) -> None:
    console.print(_plain(text), soft_wrap=True, highlight=False, markup=False)


def _plain(text: str) -> str:
    """Without what a terminal would obey: a capture is another's text."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
