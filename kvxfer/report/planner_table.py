"""A plan, or its validation, on a terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvxfer.pd.plan_summary import Plan, ValidatedPoint
from kvxfer.report.pd_words import format_ms
from kvxfer.report.planner_figures import (
    LEGEND,
    facts,
    headers,
    remarks,
    row_of,
    sentences,
    shown,
    validation_rows,
)


def print_plan(plan: Plan, console: Console, *, loads: Sequence[int], most: int) -> None:
    """Write what it stands on, a table for each of ``loads`` (numbers), the choice, and remarks.

    ``most``: set-ups of one number of GPUs in a table.
    """
    for text in facts(plan):
        _line(console, text, "dim")
    for at in loads:
        rows = shown(plan, at, most)
        left_out = len(plan.candidates) - len(rows)
        more = f"; {left_out} of {len(plan.candidates)} set-ups not shown" if left_out else ""
        _line(console, f"\n{plan.loads[at]}{more}", "bold")
        _print_table(
            console,
            headers(plan),
            [row_of(one, at) for one in rows],
            bold=[
                plan.recommendation is not None and one.name == plan.recommendation.name
                for one in rows
            ],
        )
    for text in sentences(plan):
        _line(console, text)
    for text in (*LEGEND, *remarks(plan)):
        _line(console, text, "dim")


def print_validation(points: Sequence[ValidatedPoint], console: Console) -> None:
    """Write each figure as measured and as predicted."""
    names = ["set-up", "load", "figure", "measured", "predicted", "error", ""]
    rows = list(validation_rows(list(points)))
    _print_table(console, names, rows, text_columns=3)
    for text in sorted({text for point in points for text in point.extrapolated}):
        _line(console, f"* {text}", "dim")


def print_fit(rows: Sequence[tuple[str, float | None, float]], console: Console) -> None:
    """Write each measured step beside the fitted one: what it was, then seconds.

    None stands for a step that was assumed, not measured.
    """
    cells = []
    for what, measured_s, fitted_s in rows:
        measured, error = "assumed", ""
        if measured_s is not None:
            measured, error = format_ms(measured_s * 1e3), f"{fitted_s / measured_s - 1.0:+.1%}"
        cells.append([what, measured, format_ms(fitted_s * 1e3), error])
    _print_table(console, ["step", "measured, ms", "fitted, ms", "error"], cells)


def _print_table(
    console: Console,
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    bold: Sequence[bool] = (),
    text_columns: int = 1,
) -> None:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
    for at, name in enumerate(names):
        table.add_column(name, justify="left" if at < text_columns else "right", no_wrap=True)
    for at, row in enumerate(rows):
        style = "bold" if at < len(bold) and bold[at] else ""
        table.add_row(*(Text(cell, style) for cell in row))
    console.print(table)


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style), soft_wrap=True)
