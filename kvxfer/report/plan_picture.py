"""Who sends what to whom, drawn: pipeline stages over layers, tensor-parallel ranks over heads.

A rank that shares a head with others sends some layers of it. On the axis of heads such a cut lies
inside the head, as far in as the layers before it are of all layers of the stage.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from rich.text import Text

from kvxfer.report.interval_picture import Bar, Link, draw
from kvxfer.report.plan_result import Part, PlanReport, said

_MARGIN = 12
_WIDEST_AXIS = 96
_LABEL_GAP = 4


@dataclass(frozen=True, slots=True)
class _Band:
    """Layers that one source stage sends to one destination stage."""

    src_stage: int
    dst_stage: int
    layers: range


def picture(report: PlanReport, width: int) -> list[Text]:
    """The picture, at most ``width`` columns wide; a line that says so where it does not fit."""
    num_columns = min(width - _MARGIN - 1, _WIDEST_AXIS)
    bands = list(_bands(report))
    drawn = [_heads(report, band, num_columns) for band in bands]
    if any(lines is None for lines in drawn):
        return [Text(f"  no picture: the ranks do not fit into {width} columns")]
    lines: list[Text] = []
    if len(bands) > 1:
        lines += [*(_stages(report, bands, num_columns) or ()), Text()]
    lines += _head_lines(bands, drawn)
    if any(_cuts_a_head(report, band) for band in bands):
        lines.append(Text("  a wall inside a head divides its layers", style="dim"))
    return lines


def _head_lines(bands: list[_Band], drawn: list[list[Text] | None]) -> Iterator[Text]:
    """Pictures of the bands, equal ones once; with their layers where there are several."""
    groups: dict[str, list[int]] = {}
    for number, one in enumerate(drawn):
        groups.setdefault("\n".join(line.plain for line in one or ()), []).append(number)
    for position, numbers in enumerate(groups.values()):
        if position:
            yield Text()
        if len(groups) > 1:
            layers = ", ".join(said(bands[number].layers) for number in numbers)
            yield Text(f"  layers {layers}", style="bold")
        yield from drawn[numbers[0]] or ()


def _cuts_a_head(report: PlanReport, band: _Band) -> bool:
    if report.num_kv_heads == 1:  # its ruler is of layers
        return False
    ends = (end for link in _links(report, band) for end in (link.start, link.end))
    return any(end.denominator > 1 for end in ends)


def _bands(report: PlanReport) -> Iterator[_Band]:
    for src_stage, src_layers in enumerate(report.src.stages()):
        for dst_stage, dst_layers in enumerate(report.dst.stages()):
            layers = _overlap(src_layers, dst_layers)
            if layers:
                yield _Band(src_stage, dst_stage, layers)


def _stages(report: PlanReport, bands: list[_Band], num_columns: int) -> list[Text] | None:
    """Stages over the axis of layers."""
    length = report.num_layers
    tops, bottoms = (
        [
            Bar(Fraction(layers.start), Fraction(layers.stop), f"pp{stage}")
            for stage, layers in enumerate(side.stages())
        ]
        for side in (report.src, report.dst)
    )
    links = [
        Link(b.src_stage, b.dst_stage, Fraction(b.layers.start), Fraction(b.layers.stop))
        for b in bands
    ]
    lines = draw(tops, bottoms, links, length=length, num_columns=num_columns)
    if lines is None:
        return None
    starts = sorted({band.layers.start for band in bands})
    ruler = _ruler({Fraction(start): str(start) for start in starts}, length, num_columns)
    return _with_margin("layers", ruler, lines, f"pp {report.src.pp}", f"pp {report.dst.pp}")


def _heads(report: PlanReport, band: _Band, num_columns: int) -> list[Text] | None:
    """Ranks of two stages over the axis of heads."""
    length = report.num_kv_heads
    num_columns -= num_columns % length if length <= num_columns else 0
    links = list(_links(report, band))
    tops = _sources(links)
    bottoms, bottom_of = _destinations(report, band)
    numbers = {rank: number for number, (rank, _) in enumerate(tops)}
    joined = {
        (numbers[link.top], bottom_of[link.bottom]): Link(
            numbers[link.top], bottom_of[link.bottom], link.start, link.end
        )
        for link in links
    }
    lines = draw(
        [bar for _, bar in tops],
        bottoms,
        list(joined.values()),
        length=length,
        num_columns=num_columns,
    )
    if lines is None:
        return None
    unit, marks = _head_marks(report, band, [bar for _, bar in tops])
    ruler = _ruler(marks, length, num_columns)
    return _with_margin(unit, ruler, lines, f"tp {report.src.tp}", f"tp {report.dst.tp}")


def _links(report: PlanReport, band: _Band) -> Iterator[Link]:
    """What each pair of tensor-parallel ranks of the band moves, on the axis of heads."""
    src_tp, dst_tp = report.src.tp, report.dst.tp
    for pair in report.pairs:
        stages = (pair.src // src_tp, pair.dst // dst_tp)
        spans = [_span(part, band.layers) for part in pair.parts]
        found = [span for span in spans if span is not None]
        if stages == (band.src_stage, band.dst_stage) and found:
            start, end = min(found)[0], max(found)[1]
            yield Link(pair.src % src_tp, pair.dst % dst_tp, start, end)


def _span(part: Part, layers: range) -> tuple[Fraction, Fraction] | None:
    """The interval of the heads' axis that a part takes in a band of layers."""
    inside = _overlap(part.layers, layers)
    if not inside:
        return None
    first = Fraction(inside.start - layers.start, len(layers))
    end = Fraction(inside.stop - layers.start, len(layers))
    return part.heads.start + first, part.heads.stop - 1 + end


def _sources(links: list[Link]) -> list[tuple[int, Bar]]:
    """(rank, bar) of what each source rank sends to anyone."""
    spans: dict[int, tuple[Fraction, Fraction]] = {}
    for link in links:
        start, end = spans.get(link.top, (link.start, link.end))
        spans[link.top] = (min(start, link.start), max(end, link.end))
    return [(rank, Bar(*span, str(rank))) for rank, span in sorted(spans.items())]


def _destinations(report: PlanReport, band: _Band) -> tuple[list[Bar], dict[int, int]]:
    """Bars of the destination's ranks, one for all that hold the same; and which is whose."""
    first = band.dst_stage * report.dst.tp
    ranks = report.dst.ranks[first : first + report.dst.tp]
    holders: dict[range, list[int]] = {}
    for rank in ranks:
        holders.setdefault(rank.held.heads, []).append(rank.tp_rank)
    bars = [
        Bar(Fraction(heads.start), Fraction(heads.stop), _replicas(same))
        for heads, same in holders.items()
    ]
    number_of = {rank: n for n, same in enumerate(holders.values()) for rank in same}
    return bars, number_of


def _replicas(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return str(ranks[0])
    joint = "," if len(ranks) == 2 else "–"
    return f"{ranks[0]}{joint}{ranks[-1]}"


def _head_marks(
    report: PlanReport, band: _Band, tops: list[Bar]
) -> tuple[str, dict[Fraction, str]]:
    """The unit of the axis, and labels by position: of each head, or of layers where all is one."""
    if report.num_kv_heads > 1:
        half = Fraction(1, 2)
        return "heads", {head + half: str(head) for head in range(report.num_kv_heads)}
    first, count = band.layers.start, len(band.layers)
    return "layers", {bar.start: str(first + int(bar.start * count)) for bar in tops}


def _ruler(marks: dict[Fraction, str], length: int, num_columns: int) -> str:
    """Labels over the axis; those that would touch are left out."""
    ruler = ""
    for position, label in marks.items():
        column = round(position * num_columns / length) - (len(label) - 1) // 2
        if not ruler or column >= len(ruler) + _gap(marks, num_columns):
            ruler = ruler.ljust(column) + label
    return ruler


def _gap(marks: dict[Fraction, str], num_columns: int) -> int:
    return 1 if len(marks) * _LABEL_GAP <= num_columns else _LABEL_GAP


def _with_margin(unit: str, ruler: str, lines: list[Text], top: str, bottom: str) -> list[Text]:
    margins = {1: f"src {top}", 5: f"dst {bottom}"}
    body = [
        Text.assemble(f"  {margins.get(row, ''):<{_MARGIN - 2}}", line)
        for row, line in enumerate(lines)
    ]
    return [Text(f"  {unit:<{_MARGIN - 2}}{ruler}", style="dim"), *body]


def _overlap(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))
