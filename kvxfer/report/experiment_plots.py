"""An experiment's figures, drawn: distributions as a benchmark's are, curves and stacked bars.

A line carries its label at its end, or one key stands below all panels of a figure, and keeps its
colour in all of them; a lone point has its label beside it then too. What is simulated or computed
is dashed, what was measured is not.
"""

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final

import numpy as np

from kvxfer.pd.experiment_result import Axis, Bars, Curve, Curves, Distributions, Figure, How, Panel
from kvxfer.pd.summary import Distribution
from kvxfer.report import pd_cdf
from kvxfer.report.pd_plots import SETUP_COLOURS, shades
from kvxfer.units import format_number

_PANEL_INCHES: Final = (4.7, 3.3)
_TITLE_INCHES: Final = 0.4
_COLUMNS: Final = 2
_LIMIT: Final = "#777777"
_DASHES: Final = (0, (4, 2))
_LEAST_APART: Final = 0.075  # of labels, of a panel's height
_MAX_MARKERS: Final = 8  # of a line whose points are marked
_BAR_INCHES: Final = 0.45
_LEAST_PART: Final = 0.06  # of the longest bar; a narrower part has no room for its figure
_Colours = dict[str, str]


def draw_figure(figure: Figure) -> pd_cdf.Drawing:
    """Draw all panels of one figure.

    Raises:
        NotAvailable: matplotlib is not installed.
    """
    pd_cdf.require_matplotlib()
    colours = _colours(figure.panels)
    distributions = [one for one in figure.panels if isinstance(one, Distributions)]
    if distributions:
        panels = [_distribution_panel(one, colours) for one in distributions]
        return pd_cdf.draw(figure.caption, panels, key=figure.key)
    bars = [len(one.bars) for one in figure.panels if isinstance(one, Bars)]
    height = _BAR_INCHES * max(bars) + 1.4 if bars else _PANEL_INCHES[1]
    return _draw(figure, _draw_bars if bars else _draw_curves, colours, height)


def _colours(panels: Sequence[Panel]) -> _Colours:
    """A colour a label: light to dark where labels are numbers, such as requests in flight."""
    labels: list[str] = []
    for panel in panels:
        names = panel.parts if isinstance(panel, Bars) else [one.label for one in panel.series]
        labels += [name for name in names if name not in labels]
    if all(label.replace(".", "").isdigit() for label in labels):
        labels.sort(key=float)
        return dict(zip(labels, shades(len(labels)), strict=True))
    return {label: SETUP_COLOURS[at % len(SETUP_COLOURS)] for at, label in enumerate(labels)}


def _distribution_panel(one: Distributions, colours: _Colours) -> pd_cdf.Panel:
    lines = [
        pd_cdf.Line(
            series.label,
            colours[series.label],
            Distribution.of(np.array(series.values_ms)),
            dashed=_is_dashed(series.how),
        )
        for series in one.series
    ]
    return pd_cdf.Panel(one.title, one.axis, lines, one.tail)


def _is_dashed(how: How) -> bool:
    return how in ("simulated", "computed")


def _draw(
    figure: Figure,
    draw_panel: Callable[[Any, Any, _Colours, bool], None],
    colours: _Colours,
    panel_height: float,
) -> pd_cdf.Drawing:
    num_columns = min(len(figure.panels), _COLUMNS)
    num_rows = math.ceil(len(figure.panels) / _COLUMNS)
    size = (
        max(_PANEL_INCHES[0] * num_columns, 6.5),
        panel_height * num_rows + _TITLE_INCHES,
    )
    with pd_cdf.require_matplotlib().rc_context(pd_cdf.STYLE):
        sheet = import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")
        grid = list(sheet.subplots(num_rows, num_columns, squeeze=False).flat)
        for axes, panel in zip(grid, figure.panels, strict=False):
            draw_panel(axes, panel, colours, not figure.key)
            axes.set_title(panel.title, loc="left", fontsize=10)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_axisbelow(True)
        for axes in grid[len(figure.panels) :]:
            axes.set_visible(False)
        sheet.suptitle(figure.caption, x=0.01, ha="left", fontsize=11, fontweight="bold")
        if figure.key or isinstance(figure.panels[0], Bars):
            pd_cdf.draw_key(sheet, _key_lines(figure.panels, colours))
    return pd_cdf.Drawing(sheet)


def _key_lines(panels: Sequence[Panel], colours: _Colours) -> list[pd_cdf.Line]:
    empty = Distribution(np.empty(0))
    curves = [
        (curve, _has_markers(panel))
        for panel in panels
        if isinstance(panel, Curves)
        for curve in panel.series
    ]
    dashed = {curve.label for curve, _ in curves if _is_dashed(curve.how)}
    marked = {curve.label for curve, has_markers in curves if has_markers}
    points = {curve.label for curve, _ in curves if len(curve.x) == 1}
    return [
        pd_cdf.Line(
            label,
            colour,
            empty,
            dashed=label in dashed,
            marked=label in marked,
            joined=label not in points,
        )
        for label, colour in colours.items()
    ]


def _has_markers(panel: Curves) -> bool:
    return all(len(curve.x) <= _MAX_MARKERS for curve in panel.series)


def _draw_curves(axes: Any, panel: Curves, colours: _Colours, labelled: bool) -> None:
    count = len(panel.series)
    for at, curve in reversed(list(enumerate(panel.series))):
        axes.plot(
            curve.x,
            curve.y,
            color=colours[curve.label],
            linestyle=_DASHES if _is_dashed(curve.how) else "solid",
            marker="o" if _has_markers(panel) else None,
            markersize=4 + 5 * at / count,  # what coincides shows beside each other
            linewidth=1.5 + 1.5 * at / count,
        )
    for limit in panel.limits:
        axes.axhline(limit.y, color=_LIMIT, linewidth=1, linestyle=":")
        axes.annotate(
            limit.label,
            xy=(0.01, limit.y),
            xycoords=("axes fraction", "data"),
            va="bottom",
            color=_LIMIT,
            fontsize=8,
        )
    _scale(axes, "x", panel.x, [value for curve in panel.series for value in curve.x])
    heights = [value for curve in panel.series for value in curve.y]
    _scale(axes, "y", panel.y, [*heights, *(limit.y for limit in panel.limits)])
    axes.grid(color="#e2e2e2", linewidth=0.8)
    if labelled:
        _label_curves(axes, panel, colours)
    else:
        _label_points(axes, panel, colours)


def _scale(axes: Any, name: str, axis: Axis, values: Sequence[float]) -> None:
    """The scale, its marks in plain numbers, and the axis' text."""
    low, high = min(values), max(values)
    is_log = axis.scale == "log" and low > 0
    getattr(axes, f"set_{name}scale")("log" if is_log else "linear")
    if is_log:
        getattr(axes, f"set_{name}lim")(low / 1.15, high * 1.25)
    elif name == "y":
        axes.set_ylim(min(0.0, low), (high * 1.08) or 1.0)
    ticks = axis.ticks or (_log_ticks(low / 1.15, high * 1.25) if is_log else [])
    if ticks:
        getattr(axes, f"set_{name}ticks")(ticks, [_tick(tick) for tick in ticks])
        axes.minorticks_off()
    getattr(axes, f"set_{name}label")(axis.text)


def _tick(value: float) -> str:
    """A place that was measured is not rounded: 1,024 stays that."""
    return f"{value:,.0f}" if value == round(value) else format_number(value)


def _log_ticks(low: float, high: float) -> list[float]:
    if high / low < 10:  # 1, 2, 5 would be two of them
        locator = import_module("matplotlib.ticker").MaxNLocator(8, steps=[1, 2, 5, 10])
        return [float(value) for value in locator.tick_values(low, high) if low <= value <= high]
    steps = (1, 2, 5) if high / low < 200 else (1, 3) if high / low < 2000 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = (step * 10.0**decade for decade in decades for step in steps)
    return [value for value in every if low <= value <= high]


def _label_points(axes: Any, panel: Curves, colours: _Colours) -> None:
    """The label of each lone point beside it, apart from those of others."""
    found = [(_end(axes, curve), curve.label) for curve in panel.series if len(curve.x) == 1]
    found.sort(key=lambda pair: pair[0][1])
    places = pd_cdf.apart([y for (_, y), _ in found], _LEAST_APART)
    for ((x, y), label), place in zip(found, places, strict=True):
        beside = x + 0.04 if x < 0.7 else x - 0.04
        _label(axes, label, (x, y), (beside, place), colours[label])


def _label_curves(axes: Any, panel: Curves, colours: _Colours) -> None:
    """Each label right of the panel, at the height where its line ends."""
    ends = [(_end(axes, curve), curve.label) for curve in panel.series]
    ends.sort(key=lambda pair: pair[0][1])
    places = pd_cdf.apart([y for (_, y), _ in ends], _LEAST_APART)
    for (end, label), place in zip(ends, places, strict=True):
        _label(axes, label, end, (1.03, place), colours[label])


def _end(axes: Any, curve: Curve) -> tuple[float, float]:
    """Where a line ends, as shares of the panel."""
    to_share = axes.transData + axes.transAxes.inverted()
    x, y = to_share.transform((curve.x[-1], curve.y[-1]))
    return float(x), float(y)


def _label(
    axes: Any, text: str, of: tuple[float, float], place: tuple[float, float], colour: str
) -> None:
    """A label, joined by a stroke to what it is of; both places as shares of the panel."""
    axes.annotate(
        text,
        xy=of,
        xytext=place,
        xycoords="axes fraction",
        textcoords="axes fraction",
        ha="left" if place[0] > of[0] else "right",
        va="center",
        color=colour,
        fontweight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},  # a line may pass behind
        arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7},
    )


def _draw_bars(axes: Any, panel: Bars, colours: _Colours, labelled: bool) -> None:
    longest = max(sum(bar.values) for bar in panel.bars) or 1.0
    for row, bar in enumerate(panel.bars):
        left = 0.0
        for part, value in zip(panel.parts, bar.values, strict=True):
            axes.barh(row, value, left=left, color=colours[part], height=0.7)
            if len(panel.parts) > 1 and value >= _LEAST_PART * longest:
                axes.text(
                    left + value / 2,
                    row,
                    format_number(value),
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=8,
                )
            left += value
        axes.text(left + 0.01 * longest, row, format_number(left), va="center", fontsize=9)
    names = [bar.label + (f" ({bar.how})" if _is_dashed(bar.how) else "") for bar in panel.bars]
    axes.set_yticks(range(len(panel.bars)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.12)
    axes.set_xlabel(panel.axis)
