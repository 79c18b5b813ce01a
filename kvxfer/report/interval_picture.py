"""Two rows of intervals on one axis, sources above destinations, joined by arrows.

A bar's width is its share of the axis, so what stands above what is what goes where. Bars below
that overlap get lanes of their own; an arrow to a lower lane passes those above it dotted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from rich.text import Text

_UP, _DOWN, _LEFT, _RIGHT = 1, 2, 4, 8
_LINES = " ╵╷│╴┘┐┤╶└┌├─┴┬┼"  # by the sum of the directions that meet in a cell
_COLOURS = ("cyan", "magenta", "yellow", "green", "bright_blue", "bright_red")
_LANE_ROWS = 4  # arrows, then a box of three rows


@dataclass(frozen=True, slots=True)
class Bar:
    """An interval of the axis and what stands in it."""

    start: Fraction
    end: Fraction
    label: str


@dataclass(frozen=True, slots=True)
class Link:
    """What goes from one bar above to one below, as an interval of the axis."""

    top: int
    bottom: int
    start: Fraction
    end: Fraction


@dataclass(slots=True)
class _Canvas:
    """Characters and box lines by (row, column); lines that meet join."""

    width: int
    lines: dict[tuple[int, int], int] = field(default_factory=dict)
    chars: dict[tuple[int, int], str] = field(default_factory=dict)
    styles: dict[tuple[int, int], str] = field(default_factory=dict)

    def line(self, row: int, column: int, directions: int, style: str) -> None:
        at = (row, column)
        self.lines[at] = self.lines.get(at, 0) | directions
        self.styles.setdefault(at, style)

    def text(self, row: int, column: int, text: str, style: str = "") -> None:
        for offset, char in enumerate(text):
            self.chars[row, column + offset] = char
            self.styles[row, column + offset] = style

    def box(self, row: int, first: int, last: int, style: str) -> None:
        for y, up_down in ((row, _DOWN), (row + 1, _UP | _DOWN), (row + 2, _UP)):
            self.line(y, first, up_down | (0 if y == row + 1 else _RIGHT), style)
            self.line(y, last, up_down | (0 if y == row + 1 else _LEFT), style)
        for column in range(first + 1, last):
            self.line(row, column, _LEFT | _RIGHT, style)
            self.line(row + 2, column, _LEFT | _RIGHT, style)

    def label(self, row: int, first: int, last: int, label: str, style: str) -> bool:
        """Write ``label`` between two walls, as near to their middle as arrows leave room.

        False where arrows leave none; a box too narrow for its label stays blank.
        """
        centre = first + (last - first - len(label) + 1) // 2
        starts = range(first + 1, last - len(label) + 1)
        for start in sorted(starts, key=lambda start: abs(start - centre)):
            if all((row, start + offset) not in self.chars for offset in range(len(label))):
                self.text(row, start, label, f"bold {style}".strip())
                return True
        return not starts

    def render(self) -> list[Text]:
        used = [*self.lines, *self.chars]
        rendered = []
        for row in range(1 + max(row for row, _ in used)):
            text = Text()
            for column in range(self.width):
                at = (row, column)
                char = self.chars.get(at) or _LINES[self.lines.get(at, 0)]
                text.append(char, self.styles.get(at, ""))
            text.rstrip()
            rendered.append(text)
        return rendered


def draw(
    tops: Sequence[Bar],
    bottoms: Sequence[Bar],
    links: Sequence[Link],
    *,
    length: int,
    num_columns: int,
) -> list[Text] | None:
    """Draw the bars and links on an axis of ``length`` units, ``num_columns`` and one wide.

    Returns:
        One line a row; None where a bar or link is too narrow to be seen.
    """

    def column(position: Fraction) -> int:
        return round(position * num_columns / length)

    spans = [[(column(bar.start), column(bar.end)) for bar in bars] for bars in (tops, bottoms)]
    if any(last - first < 2 for bars in spans for first, last in bars):
        return None
    canvas = _Canvas(num_columns + 1)
    for bar, (first, last) in zip(tops, spans[0], strict=True):
        canvas.box(0, first, last, "")
        canvas.label(1, first, last, bar.label, "")
    lanes = _lanes(bottoms)
    styles = [_COLOURS[number % len(_COLOURS)] for number in range(len(bottoms))]
    boxes = list(zip(bottoms, spans[1], lanes, styles, strict=True))
    for _, (first, last), lane, style in boxes:
        canvas.box(_LANE_ROWS * (lane + 1), first, last, style)
    taken: dict[int, int] = {}  # which top's arrow stands in a column
    for link in sorted(links, key=lambda link: lanes[link.bottom]):
        lane = lanes[link.bottom]
        rows = range(_LANE_ROWS - 1, _LANE_ROWS * (lane + 1))
        beside = {lanes[one.bottom] for one in links if one.top == link.top and _meet(one, link)}
        order = sorted(beside).index(lane) + 1
        wanted = column(link.start + (link.end - link.start) * order / (len(beside) + 1))
        columns = _columns(canvas, rows, (column(link.start), wanted, column(link.end)))
        free = [at for at in columns if at not in taken]
        # Where it is crowded, one arrow of a source goes on to a lower lane.
        at = next(iter(free or [at for at in columns if taken[at] == link.top]), None)
        if at is None:
            return None
        taken[at] = link.top
        _arrow(canvas, rows, at, styles[link.bottom])
    fits = [
        canvas.label(_LANE_ROWS * (lane + 1) + 1, first, last, bar.label, style)
        for bar, (first, last), lane, style in boxes
    ]
    return canvas.render() if all(fits) else None


def _arrow(canvas: _Canvas, rows: range, column: int, style: str) -> None:
    canvas.line(rows[0] - 1, column, _DOWN, "")
    for row in rows[:-1]:
        if (row, column) not in canvas.chars:
            canvas.text(row, column, "┊", style)
    canvas.text(rows[-1], column, "▼", style)


def _meet(one: Link, other: Link) -> bool:
    return one.start < other.end and other.start < one.end


def _columns(canvas: _Canvas, rows: range, span: tuple[int, int, int]) -> list[int]:
    """The columns of a link (first, wanted, last) that cross no side of a box, best first."""
    first, wanted, last = span
    columns = sorted(range(first, last + 1), key=lambda at: (at in (first, last), abs(at - wanted)))

    def is_open(at: int) -> bool:
        begins_at_side = canvas.lines.get((rows[0] - 1, at), 0) & _UP
        crossed = (canvas.lines.get((row, at), 0) for row in rows)
        return not (begins_at_side or any(one & (_UP | _DOWN) for one in crossed))

    return list(filter(is_open, columns))


def _lanes(bars: Sequence[Bar]) -> list[int]:
    """For each bar the first lane in which it overlaps none before it."""
    ends: list[Fraction] = []
    lanes = []
    for bar in bars:
        lane = next((n for n, end in enumerate(ends) if end <= bar.start), len(ends))
        ends[lane : lane + 1] = [bar.end]
        lanes.append(lane)
    return lanes
