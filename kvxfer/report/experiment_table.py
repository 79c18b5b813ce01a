"""An experiment's outcome on a terminal: findings first, then tables, then where it comes from."""

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from kvxfer.pd.experiment_result import ExperimentResult, Table
from kvxfer.report.experiment_words import cells, findings, header, is_text, sources, title

_WIDEST = 10_000  # columns; wider than any table here


def print_experiment(result: ExperimentResult, console: Console) -> None:
    """Write everything but figures; a pipe is as wide as the widest table."""
    _line(console, f"{result.name}: {result.question}", "bold")
    for text in result.faults:
        _line(console, f"FAULT: {text}", "bold red")
    for text in findings(result):
        _line(console, f"- {text}")
    for table in result.tables:
        _line(console, f"\n{title(table)}", "bold")
        _print_table(table, console)
    for text in sources(result):
        _line(console, f"source: {text}", "dim")
    for text in result.notes:
        _line(console, f"note: {text}", "dim")


def _print_table(table: Table, console: Console) -> None:
    shown = RichTable(box=box.SIMPLE_HEAD, collapse_padding=True)
    for at, column in enumerate(table.columns):
        shown.add_column(
            header(column), justify="left" if is_text(table, at) else "right", no_wrap=True
        )
    for row in table.rows:
        shown.add_row(*(Text(cell) for cell in cells(row)))
    if not console.is_terminal:
        options = console.options.update(width=_WIDEST)
        console.width = max(console.width, Measurement.get(console, options, shown).maximum)
    console.print(shown)


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style), soft_wrap=True)
