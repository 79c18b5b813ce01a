"""A sweep of layouts as matrices: rows are sources, columns destinations."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from kvxfer.sweep.result import Skipped, SweepReport, SweepResult

_Cells: TypeAlias = dict[tuple[str, str], str]

_REFUSED = "-"
_WIDEST = 10_000  # columns; wider than any matrix here
_TITLE = "GB/s (fraction of the contiguous copy), every byte checked on the receiver"


def is_matrix(report: SweepReport) -> bool:
    """Whether a report has several layouts, and a figure of one pair of them."""
    return len(_pairs(report)) > 1 and any(result.of_ranks for result in report.results)


def _pairs(report: SweepReport) -> dict[tuple[str, str], None]:
    """Source and destination of all rows, in order, those without a figure too."""
    rows: tuple[SweepResult | Skipped, ...] = (*report.results, *report.skipped)
    return dict.fromkeys((row.src_layout, row.dst_layout) for row in rows if row.src_layout)


def print_matrices(report: SweepReport, console: Console) -> None:
    """Write a matrix for each path, model, size and number of ranks.

    Never cuts a cell: where the console is too narrow, it is a list of pairs instead.
    """
    pairs = _pairs(report)
    groups = [(title, cells, _matrix(pairs, cells)) for title, cells in _groups(report.results)]
    needed = max(_width(console, matrix) for _, _, matrix in groups)
    if not console.is_terminal:  # a pipe is as wide as the matrix
        console.width = max(console.width, needed)
    as_list = needed > console.width
    axes = "source -> destination" if as_list else "rows: source, columns: destination"
    console.print(f"\n{_TITLE}; {axes}", highlight=False)
    for title, cells, matrix in groups:
        _line(console, f"\n{title}")
        if as_list:
            for source, destination in pairs:
                cell = cells.get((source, destination), _REFUSED)
                _line(console, f"{source} -> {destination}: {cell}")
        else:
            console.print(matrix)


def _line(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def _groups(results: Sequence[SweepResult]) -> Iterator[tuple[str, _Cells]]:
    groups: dict[str, _Cells] = {}
    for result in results:
        where = f"{result.sm_budget} SMs" if result.memory == "device" else result.memory
        title = (
            f"{result.transport} {result.op}, {where}, {result.model}, {result.num_kv_heads} "
            f"heads, {result.num_tokens} tokens, {result.block_order}, TP {result.src_tp}:"
            f"{result.dst_tp}"
        )
        if (result.src_pp, result.dst_pp) != (1, 1):
            title += f", PP {result.src_pp}:{result.dst_pp}"
        groups.setdefault(title, {})[result.src_layout, result.dst_layout] = _cell(result)
    yield from groups.items()


def _matrix(pairs: Iterable[tuple[str, str]], cells: _Cells) -> Table:
    sources, destinations = map(dict.fromkeys, zip(*pairs, strict=True))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in destinations:  # a word a line, so that columns stay as narrow as figures
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    for source in sources:
        row = [cells.get((source, name), _REFUSED) for name in destinations]
        table.add_row(source, *row)
    return table


def _width(console: Console, matrix: Table) -> int:
    """Columns that it takes."""
    return Measurement.get(console, console.options.update(width=_WIDEST), matrix).maximum


def _cell(result: SweepResult) -> str:
    return f"{result.gb_per_s.p50:.4g} ({result.fraction_of_limit:.0%})"
