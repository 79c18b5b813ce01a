"""A sweep as a table."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from kvxfer.report.sweep_matrix import is_matrix, print_matrices
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
# Of a sweep where each side is several ranks.
RANK_COLUMNS = (
    "transport",
    "model",
    "heads",
    "tokens",
    "layout",
    "blocks",
    "tp",
    "pp",
    "run",
    "runs",
    "GB/s p50",
    "latency p50",
    "p90",
    "p99",
    "plan",
    "limit GB/s",
    "of limit",
    "spread",
)
TEXT_COLUMNS = ("transport", "model", "blocks", "layout", "tp", "pp")
_TITLE = "every byte checked on the receiver"
_SAME_FIRST = ("model", "blocks", "block", "tokens", "page", "pages", "layout", "heads", "pp")
_LEAST_NEEDED = ("plan", "p90", "pages", "p99", "runs", "limit GB/s", "spread")


def format_us(value: float) -> str:
    """Microseconds with a unit that keeps three figures."""
    if value < 1000:
        return f"{value:.3g} µs" if value < 100 else f"{value:.0f} µs"
    return f"{value / 1000:.3g} ms" if value < 100_000 else f"{value / 1000:.0f} ms"


def table_of(results: Sequence[SweepResult]) -> dict[str, tuple[str, ...]]:
    """The cells of each column, for one result or more."""
    of_ranks = any(result.of_ranks for result in results)
    names = RANK_COLUMNS if of_ranks else COLUMNS
    rows = [_cells(result) for result in results]
    table = {name: tuple(row[name] for row in rows) for name in names}
    if set(table.get("pp", ())) == {"1:1"}:  # no pipeline stages, nothing to say
        del table["pp"]
    return table


def layouts_of(result: SweepResult) -> str:
    """The layout of both sides, or from one to the other."""
    if result.src_layout == result.dst_layout:
        return result.src_layout
    return f"{result.src_layout} -> {result.dst_layout}"


def _cells(result: SweepResult) -> dict[str, str]:
    where = _sms(result) if result.memory == "device" and not result.peer else result.memory
    latency = result.latency_us
    spread, run_bytes = result.rank_spread, result.run_bytes
    return {
        "transport": f"{result.transport} {result.op}, {where}",
        "model": result.model,
        "heads": str(result.num_kv_heads),
        "tokens": str(result.num_tokens),
        "layout": layouts_of(result),
        "block": str(result.block_size),
        "page": format_bytes(result.page_bytes),
        "pages": str(result.num_pages),
        "blocks": result.block_order,
        "tp": f"{result.src_tp}:{result.dst_tp}",
        "pp": f"{result.src_pp}:{result.dst_pp}",
        "run": "" if run_bytes is None else format_bytes(run_bytes),
        "runs": str(result.num_runs),
        "GB/s p50": f"{result.gb_per_s.p50:.4g}",
        "latency p50": format_us(latency.p50),
        "p90": format_us(latency.p90),
        "p99": format_us(latency.p99),
        "plan": format_us(result.plan_us.p50),
        "limit GB/s": f"{result.limit_gb_per_s:.4g}",
        "of limit": f"{result.fraction_of_limit:.0%}",
        "spread": "" if spread is None else f"{spread:.2f}",
    }


def _sms(result: SweepResult) -> str:
    return f"{result.sm_count} SMs"


def print_report(report: SweepReport, console: Console) -> None:
    """Write the table, then notes, compute effects and what was skipped.

    Never cuts a cell: where the console is too narrow, columns that say the same in every row move
    above the table, then the least needed ones go, and a line names them.
    """
    if is_matrix(report):
        print_matrices(report, console)
    elif report.results:
        _print_table(report.results, console)
    for line in remarks(report):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _print_table(results: list[SweepResult], console: Console) -> None:
    columns = table_of(results)
    if not console.is_terminal:  # a pipe is as wide as the table
        console.width = max(console.width, _width(columns))
    width = console.width
    same: list[str] = []
    hidden: list[str] = []
    for name in _SAME_FIRST:
        if _width(columns) > width and len(set(columns.get(name, ()))) == 1:
            same.append(f"{name} {columns.pop(name)[0]}")
    for name in _LEAST_NEEDED:
        if _width(columns) > width and name in columns:
            del columns[name]
            hidden.append(name)
    table = Table(box=box.SIMPLE_HEAD, title=", ".join([_TITLE, *same]))
    for name in columns:
        table.add_column(name, justify="left" if name in TEXT_COLUMNS else "right", no_wrap=True)
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
    lines = _paths(report.results)
    settings = {(f"{row.transport} {row.op}", row.settings) for row in report.results if row.peer}
    lines += [f"settings of {row}: {text}" for row, text in sorted(settings)]
    for row in report.results:
        effect = row.compute
        if effect is not None:
            lines.append(
                f"{effect.kind} on {effect.side} beside {row.gb_per_s.p50:.0f} GB/s "
                f"({_sms(row)}): {effect.alone_us:.0f} -> {effect.beside_us:.0f} µs, "
                f"{effect.slowdown:+.1%}"
            )
        where = f"{row.transport} {row.op}, {row.memory}, {row.model}, {row.num_tokens} tokens"
        if row.of_ranks:
            where += f", TP {row.src_tp}:{row.dst_tp}, {layouts_of(row)}"
        lines += [f"note ({where}): {note}" for note in row.notes]
    for skipped in report.skipped:
        word = "FAILED" if skipped.failed else "skipped"
        lines.append(f"{word}: {skipped.case}: {skipped.reason}")
    if report.interrupted:
        done = "the table holds what was measured until then"
        lines.append(f"interrupted{': ' + done if report.results else ' before the first result'}")
    return lines


def _paths(results: Sequence[SweepResult]) -> list[str]:
    """What carried which rows; their sizes are named where rows of one label took several paths."""
    taken: dict[str, dict[str, list[str]]] = {}
    for row in results:
        paths = taken.setdefault(f"{row.transport} {row.op}, {row.memory}", {})
        size = f"{row.model} {row.num_tokens} tokens, page {format_bytes(row.page_bytes)}"
        paths.setdefault(row.actual_path, []).append(size)
    lines = []
    for label, paths in sorted(taken.items()):
        for path, sizes in sorted(paths.items()):
            which = f" ({'; '.join(dict.fromkeys(sizes))})" if len(paths) > 1 else ""
            lines.append(f"path of {label}: {path}{which}")
    return lines
