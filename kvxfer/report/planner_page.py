"""A plan as one HTML page that needs nothing beside it, and its drawing."""

from collections.abc import Iterator, Sequence
from html import escape

from kvxfer.pd.plan_summary import Candidate, Plan
from kvxfer.report.export import write_file
from kvxfer.report.pd_cdf import Drawing, draw, require_matplotlib
from kvxfer.report.pd_page import CSS
from kvxfer.report.pd_plots import MAX_LINES, side_by_side
from kvxfer.report.planner_figures import (
    LEGEND,
    facts,
    headers,
    remarks,
    row_of,
    sentences,
    shown,
)
from kvxfer.units import format_gpus


def plan_page(plan: Plan) -> str:
    """The whole page: the choice, distributions and a table a load, remarks.

    Raises:
        NotAvailable: matplotlib is not installed.
    """
    title = f"Plan: {plan.model}"
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(text)}</p>" for text in sentences(plan)),
        _list(facts(plan)),
    ]
    for at in reversed(range(len(plan.loads))):
        label = escape(plan.loads[at])
        parts += [
            f"<h2>{label}</h2>",
            f'<figure role="img" aria-label="{label}">{drawing_of(plan, at).svg()}</figure>',
            *_table(plan, at),
        ]
    parts += [f'<p class="legend">{escape(text)}</p>' for text in LEGEND]
    return "\n".join([*parts, _list(list(remarks(plan))), "</body></html>", ""])


def plan_picture(plan: Plan, path: str) -> None:
    """Write the distributions under the heaviest load as a PNG.

    Raises:
        NotAvailable: matplotlib is not installed.
        InvalidUsage: the file cannot be written.
    """
    write_file(path, drawing_of(plan, len(plan.loads) - 1).png())


def drawing_of(plan: Plan, at: int) -> Drawing:
    """TTFT, first gap and later gaps of the leading set-ups under one load.

    Raises:
        NotAvailable: matplotlib is not installed.
    """
    require_matplotlib()
    lines = [
        (
            f"{one.name} ({format_gpus(one.num_gpus)})",
            one.kind == "aggregated",
            one.points[at].summary,
        )
        for one in _leading(plan, at)
    ]
    panels = list(side_by_side(lines))
    return draw(f"Predicted: {plan.model}, {plan.loads[at]}", panels, key=True)


def _leading(plan: Plan, at: int) -> list[Candidate]:
    """The recommended one, then the best of each kind and number of GPUs, the most GPUs first."""
    chosen = [
        one
        for one in plan.candidates
        if plan.recommendation is not None and one.name == plan.recommendation.name
    ]
    best: dict[tuple[int, str], Candidate] = {}
    for one in shown(plan, at, len(plan.candidates)):
        best.setdefault((-one.num_gpus, one.kind), one)
    others = [best[key] for key in sorted(best) if best[key] not in chosen]
    return [*chosen, *others][:MAX_LINES]


def _table(plan: Plan, at: int) -> Iterator[str]:
    head = "".join(f"<th>{escape(name)}</th>" for name in headers(plan))
    yield f"<table><thead><tr>{head}</tr></thead><tbody>"
    for one in shown(plan, at, len(plan.candidates)):
        best = plan.recommendation is not None and one.name == plan.recommendation.name
        first, *rest = row_of(one, at)
        kind = ' class="best"' if best else ""
        cells = "".join(f"<td{kind}>{escape(cell)}</td>" for cell in rest)
        yield f'<tr><td class="text">{escape(first)}</td>{cells}</tr>'
    yield "</tbody></table>"


def _list(texts: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if texts else ""
