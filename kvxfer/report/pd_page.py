"""A benchmark of PD set-ups as one HTML page that needs nothing beside it, and as pictures."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from kvxfer.pd.summary import Load, RunSummary
from kvxfer.report.pd_figures import DEFAULT_PERCENTILES, Row, rows_of
from kvxfer.report.pd_plots import Plot
from kvxfer.report.pd_words import LEGEND, findings_of, sentences, setup_lines
from kvxfer.whole_file import write_whole

CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 2rem auto;
  padding: 0 1rem; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-top: 1px solid #ddd;
  padding-top: 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0;
  font-size: 13px }
th, td { padding: .15rem .7rem; text-align: right; white-space: nowrap }
th.text, td.text { text-align: left } tbody.figure { border-top: 1px solid #ddd }
td.best { font-weight: 700 } thead th { border-bottom: 2px solid #222 }
figure { margin: 1.5rem 0; overflow-x: auto } figure svg { max-width: 100%; height: auto }
.fault { color: #a00; font-weight: 600 } .legend { color: #555; font-size: 13px }
"""


def html_page(
    run: RunSummary,
    drawings: Sequence[Plot],
    *,
    title: str,
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
) -> str:
    """The whole page: faults, who wins where, drawings and a table a load, set-ups.

    ``drawings`` are what :func:`~kvxfer.report.pd_plots.plots` made of ``run``.
    """
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *_findings(run, serious=True),
        *_setups(run),
    ]
    for load in run.loads():
        parts += [f"<h2>{escape(str(load))}</h2>", *_items(sentences(run, load))]
        parts += [_figure(plot) for plot in drawings if plot.load == load]
        parts += _table(run, load, percentiles)
    parts += [f'<p class="legend">{escape(text)}</p>' for text in LEGEND]
    return "\n".join([*parts, *_findings(run, serious=False), "</body></html>", ""])


def write_pictures(drawings: Sequence[Plot], folder: Path) -> list[Path]:
    """Write each drawing as a PNG; returns the files.

    Raises:
        InvalidUsage: the folder cannot be made or written.
    """
    return [
        write_whole(folder / f"{plot.name}.png", plot.drawing.png(), make_folders=True)
        for plot in drawings
    ]


def _findings(run: RunSummary, *, serious: bool) -> Iterator[str]:
    texts = [text for is_serious, text in findings_of(run) if is_serious == serious]
    if texts:
        yield f"<h2>{'Faults of the measurement' if serious else 'Notes'}</h2>"
        yield from _items(texts, "fault" if serious else "")


def _items(texts: Sequence[str], kind: str = "") -> Iterator[str]:
    if texts:
        items = "".join(f"<li>{escape(text)}</li>" for text in texts)
        yield f'<ul class="{kind}">{items}</ul>'


def _setups(run: RunSummary) -> Iterator[str]:
    rows = "".join(
        f'<tr><td class="text"><b>{escape(name)}</b></td><td class="text">{escape(text)}</td></tr>'
        for name, text in setup_lines(run)
    )
    yield f"<table>{rows}</table>"
    if run.objectives:
        yield f"<p>Good: a request with {escape(' and '.join(run.objectives))}.</p>"


def _figure(plot: Plot) -> str:
    label = escape(plot.caption, quote=True)
    return f'<figure role="img" aria-label="{label}">{plot.drawing.svg()}</figure>'


def _table(run: RunSummary, load: Load, percentiles: Sequence[float]) -> Iterator[str]:
    columns = "".join(f"<th>{value}</th>" for value in run.concurrencies(load))
    yield (
        '<table><thead><tr><th class="text" colspan="2">concurrent requests</th>'
        f"{columns}</tr></thead>"
    )
    rows = rows_of(run, load, percentiles)
    for figure, group in groupby(rows, key=lambda row: row.figure):
        body = "".join(_row(figure if at == 0 else "", row) for at, row in enumerate(group))
        yield f'<tbody class="figure">{body}</tbody>'
    yield "</table>"


def _row(figure: str, row: Row) -> str:
    cells = "".join(
        f'<td class="best">{escape(cell.text)}</td>'
        if cell.best
        else f"<td>{escape(cell.text)}</td>"
        for cell in row.cells
    )
    head = f'<td class="text">{escape(figure)}</td><td class="text">{escape(row.setup)}</td>'
    return f"<tr>{head}{cells}</tr>"
