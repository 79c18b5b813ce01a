"""An experiment's cells and sentences as text, for any output to lay out."""

from collections.abc import Iterator

from kvxfer.pd.experiment_result import Cell, Column, ExperimentResult, How, Table
from kvxfer.units import format_number

_HOW: dict[How, str] = {
    "measured": "measured now",
    "recorded": "measured before, from records",
    "simulated": "simulated",
    "computed": "computed",
}


def how_text(how: How) -> str:
    """How a part of a result was got, in words."""
    return _HOW[how]


def title(table: Table) -> str:
    """A table's title, and how all of its rows were got."""
    return table.title if table.how is None else f"{table.title} ({how_text(table.how)})"


def header(column: Column) -> str:
    """A column's name and unit."""
    return f"{column.name}, {column.unit}" if column.unit else column.name


def cells(row: list[Cell]) -> list[str]:
    """A row as text; what has no figure is empty."""
    return [
        "" if cell is None else cell if isinstance(cell, str) else format_number(cell)
        for cell in row
    ]


def is_text(table: Table, at: int) -> bool:
    """Whether a column holds text, so that it stands to the left."""
    return any(isinstance(row[at], str) for row in table.rows)


def findings(result: ExperimentResult) -> Iterator[str]:
    """Each finding, and how its figures were got."""
    return (f"{one.text} [{one.how}]" for one in result.findings)


def sources(result: ExperimentResult) -> Iterator[str]:
    """Each part and where it comes from."""
    return (f"{one.what}: {how_text(one.how)}" for one in result.sources)
