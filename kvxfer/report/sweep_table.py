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
    "GB/s p50",
    "latency p50",
    "p90",
    "p99",
    "plan",
    "limit GB/s",
    "of limit",
)


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
    """Write the table, then notes, compute effects and what was skipped."""
    if report.results:
        table = Table(box=box.SIMPLE_HEAD, title="every byte checked on the receiver")
        for index, name in enumerate(COLUMNS):
            table.add_column(name, justify="left" if index < 2 else "right", no_wrap=index >= 2)
        for result in report.results:
            table.add_row(*row_of(result))
        console.print(table)
    for line in remarks(report):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def remarks(report: SweepReport) -> list[str]:
    """Everything worth saying that is not a column."""
    paths = dict.fromkeys(row.actual_path for row in report.results)
    lines = [f"path: {path}" for path in paths]
    for row in report.results:
        effect = row.compute
        if effect is not None:
            lines.append(
                f"{effect.kind} on {effect.side} beside {row.gb_per_s.p50:.0f} GB/s "
                f"({_sms(row)}): {effect.alone_us:.0f} -> {effect.beside_us:.0f} µs, "
                f"{effect.slowdown:+.1%}"
            )
        where = f"{row.transport} {row.op}, {row.memory}, {format_bytes(row.page_bytes)} pages"
        lines += [f"note ({where}): {note}" for note in row.notes]
    for skipped in report.skipped:
        word = "FAILED" if skipped.failed else "skipped"
        lines.append(f"{word}: {skipped.case}: {skipped.reason}")
    if report.interrupted:
        lines.append("interrupted: the table holds what was measured until then")
    return lines
