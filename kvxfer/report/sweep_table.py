"""A sweep as a table."""

from rich import box
from rich.console import Console
from rich.table import Table

from kvxfer.sweep.result import SweepReport, SweepResult
from kvxfer.units import format_bytes

COLUMNS = (
    "transport",
    "model",
    "tokens",
    "block",
    "page",
    "pages",
    "blocks",
    "GB/s p50",
    "latency p50",
    "p90",
    "p99",
    "plan",
    "limit GB/s",
    "of limit",
)
_TEXT = ("transport", "model", "blocks")
_TITLE = "every byte checked on the receiver"
_SAME_FIRST = ("model", "blocks", "block", "tokens", "page", "pages")
_LEAST_NEEDED = ("plan", "p90", "pages", "p99", "limit GB/s")


def format_us(value: float) -> str:
    """Microseconds with a unit that keeps three figures."""
    if value < 1000:
        return f"{value:.3g} µs" if value < 100 else f"{value:.0f} µs"
    return f"{value / 1000:.3g} ms" if value < 100_000 else f"{value / 1000:.0f} ms"


def row_of(result: SweepResult) -> tuple[str, ...]:
    """One result in the order of :data:`COLUMNS`."""
    where = result.memory if result.memory != "device" else _sms(result)
    latency = result.latency_us
    return (
        f"{result.transport} {result.op}, {where}",
        result.model,
        str(result.num_tokens),
        str(result.block_size),
        format_bytes(result.page_bytes),
        str(result.num_pages),
        result.block_order,
        f"{result.gb_per_s.p50:.4g}",
        format_us(latency.p50),
        format_us(latency.p90),
        format_us(latency.p99),
        format_us(result.plan_us.p50),
        f"{result.limit_gb_per_s:.4g}",
        f"{result.fraction_of_limit:.0%}",
    )


def _sms(result: SweepResult) -> str:
    return f"{result.sm_count} SMs"


def print_report(report: SweepReport, console: Console) -> None:
    """Write the table, then notes, compute effects and what was skipped.

    Never cuts a cell: where the console is too narrow, columns that say the same in every row move
    above the table, then the least needed ones go, and a line names them.
    """
    if report.results:
        _print_table(report.results, console)
    for line in remarks(report):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _print_table(results: list[SweepResult], console: Console) -> None:
    columns = dict(zip(COLUMNS, zip(*map(row_of, results), strict=True), strict=True))
    if not console.is_terminal:  # a pipe is as wide as the table
        console.width = max(console.width, _width(columns))
    width = console.width
    same: list[str] = []
    hidden: list[str] = []
    for name in _SAME_FIRST:
        if _width(columns) > width and len(set(columns[name])) == 1:
            same.append(f"{name} {columns.pop(name)[0]}")
    for name in _LEAST_NEEDED:
        if _width(columns) > width and name in columns:
            del columns[name]
            hidden.append(name)
    table = Table(box=box.SIMPLE_HEAD, title=", ".join([_TITLE, *same]))
    for name in columns:
        table.add_column(name, justify="left" if name in _TEXT else "right", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    console.print(table)
    if hidden:
        console.print(f"columns left out for want of width: {', '.join(hidden)}", soft_wrap=True)


def _width(columns: dict[str, tuple[str, ...]]) -> int:
    """Characters that the table takes."""
    return 1 + sum(3 + max(map(len, (name, *cells))) for name, cells in columns.items())


def remarks(report: SweepReport) -> list[str]:
    """Everything worth saying that is not a column."""
    rows = {(f"{row.transport} {row.op}, {row.memory}", row.actual_path) for row in report.results}
    lines = [f"path of {row}: {path}" for row, path in sorted(rows)]
    for row in report.results:
        effect = row.compute
        if effect is not None:
            lines.append(
                f"{effect.kind} on {effect.side} beside {row.gb_per_s.p50:.0f} GB/s "
                f"({_sms(row)}): {effect.alone_us:.0f} -> {effect.beside_us:.0f} µs, "
                f"{effect.slowdown:+.1%}"
            )
        where = f"{row.transport} {row.op}, {row.memory}, {row.model}, {row.num_tokens} tokens"
        lines += [f"note ({where}): {note}" for note in row.notes]
    for skipped in report.skipped:
        word = "FAILED" if skipped.failed else "skipped"
        lines.append(f"{word}: {skipped.case}: {skipped.reason}")
    if report.interrupted:
        done = "the table holds what was measured until then"
        lines.append(f"interrupted{': ' + done if report.results else ' before the first result'}")
    return lines
