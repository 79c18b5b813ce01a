"""An experiment's outcome as one HTML page that needs nothing beside it, and its PNG files."""

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from kvxfer.pd.experiment_result import ExperimentResult, Figure, Table
from kvxfer.report.experiment_plots import draw_figure
from kvxfer.report.experiment_words import cells, findings, header, is_text, sources
from kvxfer.report.experiment_words import title as table_title
from kvxfer.report.pd_page import CSS
from kvxfer.whole_file import write_whole

PAGE_FILE = "index.html"


def write_report(result: ExperimentResult, folder: Path) -> Path:
    """Write the page, and each figure as ``NAME.png`` beside it; returns the page.

    Raises:
        NotAvailable: matplotlib is not installed.
        InvalidUsage: the folder cannot be made or written.
    """
    drawings = [(figure, draw_figure(figure)) for figure in result.figures]
    page = experiment_page(result, ((figure, one.svg()) for figure, one in drawings))
    path = write_whole(folder / PAGE_FILE, page.encode(), make_folders=True)
    for figure, drawing in drawings:
        write_whole(folder / f"{figure.name}.png", drawing.png())
    return path


def experiment_page(result: ExperimentResult, drawings: Iterable[tuple[Figure, str]]) -> str:
    """The whole page: question, faults, findings, figures, tables, and what they stand on.

    Args:
        drawings: each figure and its ``<svg>`` element.
    """
    title = f"Experiment {result.name}"
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body>",
        f"<h1>{escape(title)}</h1><p>{escape(result.question)}</p>",
        *_items("Faults of the measurement", result.faults, "fault"),
        *_items("Findings", findings(result)),
        *(_figure(figure, svg) for figure, svg in drawings),
        *(part for table in result.tables for part in _table(table)),
        '<p class="legend">Dashed lines are simulated or computed, solid ones measured.</p>',
        *_items("Where this comes from", sources(result)),
        *_items("Notes", result.notes),
        *_items("Environment", (f"{name}: {value}" for name, value in result.environment.items())),
        *_items("Commands", result.commands),
        f'<p class="legend">{escape(result.schema)}, {escape(result.scale)}, '
        f"{escape(result.made_at)}</p>",
    ]
    return "\n".join([*parts, "</body></html>", ""])


def _items(title: str, texts: Iterable[str], kind: str = "") -> Iterator[str]:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    if items:
        yield f'<h2>{escape(title)}</h2><ul class="{kind}">{items}</ul>'


def _figure(figure: Figure, svg: str) -> str:
    label = escape(figure.caption, quote=True)
    return f'<figure role="img" aria-label="{label}">{svg}</figure>'


def _table(table: Table) -> Iterator[str]:
    kinds = [' class="text"' if is_text(table, at) else "" for at in range(len(table.columns))]
    names = (header(column) for column in table.columns)
    head = "".join(
        f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, names, strict=True)
    )
    yield f"<h2>{escape(table_title(table))}</h2>"
    yield f"<table><thead><tr>{head}</tr></thead><tbody>"
    for row in table.rows:
        pairs = zip(kinds, cells(row), strict=True)
        yield f"<tr>{''.join(f'<td{kind}>{escape(cell)}</td>' for kind, cell in pairs)}</tr>"
    yield "</tbody></table>"
