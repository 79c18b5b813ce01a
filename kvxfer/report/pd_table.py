"""A benchmark of PD set-ups on a terminal: a table a load, who wins where, findings."""

from collections.abc import Sequence
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvxfer.pd.summary import RunSummary
from kvxfer.report.pd_figures import DEFAULT_PERCENTILES, Row, rows_of
from kvxfer.report.pd_words import LEGEND, findings_of, sentences, setup_lines

_WIDEST = 10_000  # columns; wider than any table here


def print_run(
    run: RunSummary, console: Console, *, percentiles: Sequence[float] = DEFAULT_PERCENTILES
) -> None:
    """Write set-ups, a table a load, who wins where, and every finding.

    Never cuts a cell: what is too wide for a terminal stands in several tables; a pipe is as wide
    as the widest.
    """
    for name, text in setup_lines(run):
        _line(console, f"{name}: {text}")
    if run.objectives:
        _line(console, f"good: a request with {' and '.join(run.objectives)}")
    for load in run.loads():
        _line(console, f"\n{load}; columns: concurrent requests", "bold")
        _print_table(rows_of(run, load, percentiles), run.concurrencies(load), console)
    for text in LEGEND if run.loads() else ():
        _line(console, text, "dim")
    for load in run.loads():
        for at, text in enumerate(sentences(run, load)):
            _line(console, text if at else f"\n{load}\n{text}")
    for serious, text in findings_of(run):
        _line(console, f"{'FAULT' if serious else 'note'}: {text}", "bold red" if serious else "")


def _print_table(rows: Sequence[Row], concurrencies: Sequence[int], console: Console) -> None:
    """All columns, or in halves where the console is too narrow for them."""
    table = _table(rows, concurrencies)
    options = console.options.update(width=_WIDEST)
    width = Measurement.get(console, options, table).maximum
    half = len(concurrencies) // 2
    if width > console.width and console.is_terminal and half:
        left = [replace(row, cells=row.cells[:half]) for row in rows]
        right = [replace(row, cells=row.cells[half:]) for row in rows]
        _print_table(left, concurrencies[:half], console)
        _print_table(right, concurrencies[half:], console)
        return
    console.width = max(console.width, width)
    console.print(table)


def _table(rows: Sequence[Row], concurrencies: Sequence[int]) -> Table:
    """Rows: figures and set-ups; columns: concurrency."""
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    for concurrency in concurrencies:
        table.add_column(str(concurrency), justify="right", no_wrap=True)
    previous = ""
    for row in rows:
        cells = [Text(cell.text, "bold" if cell.best else "") for cell in row.cells]
        table.add_row("" if row.figure == previous else row.figure, row.setup, *cells)
        previous = row.figure
    return table


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style), soft_wrap=True)
