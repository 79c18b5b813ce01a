"""Panels of distribution functions, drawn with matplotlib.

A tail is stretched so that P50, P90, P99 and P99.9 stand at equal distances. Each line leaves its
panel at the top and has its label there. Panels with one axis text share one scale.
"""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from kvxfer.errors import NotAvailable
from kvxfer.pd.summary import Distribution, Floats
from kvxfer.report.pd_words import format_ms

_INK, _GRID = "#333333", "#e2e2e2"
_COLUMNS = 3
_PANEL_INCHES = (3.7, 3.0)
_TITLE_INCHES = 0.5
_LEAST_WIDTH_INCHES = 5.5
_KEY_CHARS = 75  # of labels in one row of a key
_MAX_POINTS = 1000  # of a line; more cannot be seen
_MAX_DECADES = 3  # of a tail: up to P99.9
_LOG_FROM = 8.0  # a scale over more than this factor is logarithmic
_LABEL_GAP = 0.075  # between labels, of a panel's width
STYLE = {
    "font.size": 9,
    "svg.fonttype": "path",
    "svg.hashsalt": "kvxfer",
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


@dataclass(frozen=True, slots=True)
class Line:
    """One distribution; ``label`` stands where it leaves the panel.

    ``marked``: its points are dots; ``joined``: and a line goes through them. Both are for a key.
    """

    label: str
    colour: str
    distribution: Distribution
    dashed: bool = False
    marked: bool = False
    joined: bool = True


@dataclass(frozen=True, slots=True)
class Panel:
    """Distributions on one pair of axes; ``tail`` stretches what is above the median."""

    title: str
    axis: str
    lines: list[Line]
    tail: bool


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure of matplotlib."""

    figure: Any

    def svg(self) -> str:
        """An ``<svg>`` element to stand in a page: no declarations, no outside names."""
        out = io.StringIO()
        self._save(out, format="svg", transparent=True, metadata={"Date": None})
        text = out.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        return re.sub(r' xmlns(?::\w+)?="[^"]*"', "", text)

    def png(self) -> bytes:
        """A PNG file."""
        out = io.BytesIO()
        self._save(out, format="png", dpi=150)
        return out.getvalue()

    def _save(self, out: io.StringIO | io.BytesIO, **options: Any) -> None:
        with require_matplotlib().rc_context(STYLE):
            self.figure.savefig(out, **options)


def require_matplotlib() -> Any:
    """The library, loaded when a drawing is asked for.

    Raises:
        NotAvailable: it is not installed.
    """
    try:
        return import_module("matplotlib")
    except ImportError as error:
        raise NotAvailable(
            "drawings need matplotlib, which is not installed: pip install matplotlib"
        ) from error


def draw(title: str, panels: Sequence[Panel], *, key: bool) -> Drawing:
    """Draw panels, up to three in a row; with a ``key`` of the lines instead of labels at them."""
    num_columns = min(len(panels), _COLUMNS)
    num_rows = math.ceil(len(panels) / _COLUMNS)
    width = max(_PANEL_INCHES[0] * num_columns, _LEAST_WIDTH_INCHES)
    height = _PANEL_INCHES[1] * num_rows + _TITLE_INCHES
    with require_matplotlib().rc_context(STYLE):
        figure = import_module("matplotlib.figure").Figure(
            figsize=(width, height), layout="constrained"
        )
        grid = figure.subplots(num_rows, num_columns, squeeze=False).flat
        scales = {axis: _scale(panels, axis) for axis in {panel.axis for panel in panels}}
        for at, (axes, panel) in enumerate(zip(grid, panels, strict=False)):
            _draw_panel(axes, panel, scales[panel.axis])
            axes.set_title(panel.title, loc="left", fontsize=10, pad=6 if key else 28)
            if at % num_columns == 0 or panel.tail != panels[at - 1].tail:
                axes.set_ylabel("share of gaps" if panel.tail else "share of requests")
            if not key:
                _label_lines(axes, panel, scales[panel.axis])
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        if key:
            draw_key(figure, panels[0].lines)
    return Drawing(figure)


@dataclass(frozen=True, slots=True)
class _Scale:
    """The range of an axis in milliseconds."""

    low: float
    high: float

    @property
    def is_log(self) -> bool:
        return self.low > 0 and self.high / self.low > _LOG_FROM

    def fraction(self, value: float) -> float:
        """Where a value stands, 0 to 1."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values within it."""
        decades = range(math.floor(math.log10(max(self.low, 1e-3))), 8)
        steps = (1, 2, 5) if self.high / max(self.low, 1e-3) < 200 else (1, 3)
        if self.is_log:
            every = (step * 10.0**decade for decade in decades for step in steps)
            return [value for value in every if self.low <= value <= self.high]
        return list(
            import_module("matplotlib.ticker").MaxNLocator(6).tick_values(self.low, self.high)
        )


def _scale(panels: Sequence[Panel], axis: str) -> _Scale:
    """From where the first line begins to where the last one leaves."""
    of_axis = [panel for panel in panels if panel.axis == axis]
    curves = [_curve(line.distribution, panel) for panel in of_axis for line in panel.lines]
    low, high = (float(of([of(x) for x, _ in curves])) for of in (np.min, np.max))
    if high / max(low, 1e-3) > _LOG_FROM:
        return _Scale(max(low, 1e-3) * 0.85, high * 1.2)
    # Times that are equal but for rounding are one line in the middle, not a staircase.
    room = max(0.06 * (high - low), 0.02 * high) or 1.0
    return _Scale(low - room, high + room)


def _decades(panel: Panel) -> int:
    """How many nines of a tail its samples resolve, at least one."""
    most = max(len(line.distribution) for line in panel.lines)
    return max(1, min(_MAX_DECADES, int(math.log10(most))))


def _curve(distribution: Distribution, panel: Panel) -> tuple[Floats, Floats]:
    """Points of the empirical distribution function up to the panel's top, in drawn units.

    Of many samples only those are kept that stand apart when drawn: evenly, or evenly in the tail.
    """
    values = distribution.values_ms
    count = len(values)
    if panel.tail:
        top = _decades(panel)
        above = np.logspace(math.log10(0.5), -top, _MAX_POINTS)  # share of samples beyond
        ranks = np.unique(np.ceil(count * (1.0 - above)).astype(int).clip(1, count))
        shares = ranks / count
        heights = -np.log10(np.maximum(1.0 - shares, 10.0**-top))
    else:
        ranks = np.unique(np.linspace(1, count, min(count, _MAX_POINTS)).round().astype(int))
        heights = ranks / count
    return values[ranks - 1], heights


def _draw_panel(axes: Any, panel: Panel, scale: _Scale) -> None:
    heights, names = _heights(panel)
    count = len(panel.lines)
    for at, line in reversed(list(enumerate(panel.lines))):
        x, y = _curve(line.distribution, panel)
        axes.step(
            [x[0], *x, x[-1]],  # a line begins at its smallest sample and ends at its largest
            [heights[0], *y, heights[-1]],
            where="post",
            color=line.colour,
            linestyle=(0, (4, 2)) if line.dashed else "solid",
            linewidth=1.4 + 2.0 * at / count,  # lines that coincide show beside each other
        )
    axes.set_xscale("log" if scale.is_log else "linear")
    axes.set_xlim(scale.low, scale.high)
    axes.set_ylim(heights[0], heights[-1])
    ticks = [tick for tick in scale.ticks() if max(0.0, scale.low) <= tick <= scale.high]
    axes.set_xticks(ticks, [format_ms(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(panel.axis)
    axes.set_yticks(heights, names)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _heights(panel: Panel) -> tuple[list[float], list[str]]:
    """Where the axis has marks, in drawn units from the bottom to the top, and their names."""
    if not panel.tail:
        shares = [0.0, 0.25, 0.5, 0.75, 1.0]
        return shares, [f"{share:.0%}" for share in shares]
    nines = range(1, _decades(panel) + 1)
    names = ["50%", *(f"{100 - 100 * 10.0**-count:g}%" for count in nines)]
    return [-math.log10(0.5), *map(float, nines)], names


def _label_lines(axes: Any, panel: Panel, scale: _Scale) -> None:
    """Each line's label above the panel, beside where it leaves, joined to it by a stroke."""
    exits = [
        (round(scale.fraction(float(_curve(line.distribution, panel)[0][-1])), 2), line)
        for line in panel.lines
    ]
    exits.sort(key=lambda pair: pair[0])  # those that leave at one place stay in order
    places = apart([at for at, _ in exits], _LABEL_GAP)
    for (at, line), place in zip(exits, places, strict=True):
        axes.annotate(
            line.label,
            xy=(at, 1.0),
            xytext=(place, 1.06),
            xycoords="axes fraction",
            textcoords="axes fraction",
            ha="center",
            va="bottom",
            color=line.colour,
            fontweight="bold",
            arrowprops={"arrowstyle": "-", "color": line.colour, "linewidth": 0.8, "shrinkB": 0},
        )


def apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Ascending places, moved as little as keeps them ``gap`` apart and within 0 to 1."""
    places: list[float] = []
    for place in wanted:
        places.append(max(place, places[-1] + gap if places else 0.0))
    limit = 1.0
    for at in reversed(range(len(places))):
        places[at] = min(places[at], limit)
        limit = places[at] - gap
    return places


def draw_key(figure: Any, lines: Sequence[Line]) -> None:
    """A key of the lines below all panels of a figure of matplotlib."""
    line_2d = import_module("matplotlib.lines").Line2D
    handles = [
        line_2d(
            [],
            [],
            color=line.colour,
            linewidth=2,
            linestyle="none" if not line.joined else "--" if line.dashed else "-",
            marker="o" if line.marked else None,
        )
        for line in lines
    ]
    longest = max(len(line.label) for line in lines)
    key = figure.legend(
        handles,
        [line.label for line in lines],
        loc="outside lower left",
        frameon=False,
        handlelength=4 if any(line.marked for line in lines) else 2,  # dashes show beside a dot
        ncols=max(1, min(len(lines), _KEY_CHARS // longest)),
    )
    for text, line in zip(key.get_texts(), lines, strict=True):
        text.set_color(line.colour)
        text.set_fontweight("bold")
