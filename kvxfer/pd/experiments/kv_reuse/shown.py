"""What was found, as sentences, a table and drawings."""

from collections.abc import Iterator, Sequence
from typing import Final

from kvxfer.pd.experiment_result import (
    MAX_SERIES,
    Axis,
    Bar,
    Bars,
    Cell,
    Column,
    Curve,
    Curves,
    Figure,
    Said,
    Table,
)
from kvxfer.pd.experiments.kv_reuse.parts import FIELDS, LOADING, NAMES, Parts
from kvxfer.pd.experiments.kv_reuse.points import Point
from kvxfer.pd.experiments.panels import holds_from
from kvxfer.pd.summary import EVEN
from kvxfer.units import format_number, format_tokens, gb_per_s

_MS: Final = 1e3


def findings_of(points: Sequence[Point]) -> Iterator[Said]:
    """Of each set-up: what reuse saves, from where on it pays, and where its time goes."""
    for name in _names(points):
        own = [point for point in points if point.name == name]
        if own[0].run.setup.reuse != "none":
            yield from _against_none(own, points)
        if own[0].has_store:
            yield from _where_time_goes(own)


def _against_none(own: Sequence[Point], points: Sequence[Point]) -> Iterator[Said]:
    pairs = [
        (point, plain)
        for point in own
        for plain in points
        if plain.run.setup.reuse == "none" and plain.hit_tokens == point.hit_tokens
    ]
    if not pairs:
        yield Said(f"{own[0].name}: nothing without reuse to compare with", own[0].how)
        return
    point, plain = pairs[-1]
    if point.hit_tokens:
        yield Said(
            f"{point.name}, {_there(point)}: TTFT P50 {_p50(point)} against {_p50(plain)} without "
            f"reuse, {plain.ttft.percentile(50) / point.ttft.percentile(50):.2f} times less",
            point.how,
        )
        yield Said(_pays_from([pair for pair in pairs if pair[0].hit_tokens]), point.how)
    first, plain = pairs[0]
    if first.hit_tokens == 0 and first.has_store:
        more_ms = first.ttft.percentile(50) - plain.ttft.percentile(50)
        yield Said(
            f"{first.name}: with nothing there, TTFT P50 is {more_ms:+.3g} ms against none: what "
            "looking up in vain and saving cost",
            first.how,
        )


def _pays_from(pairs: Sequence[tuple[Point, Point]]) -> str:
    wins = [
        point.ttft.percentile(50) < plain.ttft.percentile(50) * (1.0 - EVEN)
        for point, plain in pairs
    ]
    start = holds_from(wins)
    name = pairs[0][0].name
    if start == len(wins):
        return f"{name}: at no length of hit does reuse beat computing anew"
    tokens = format_tokens(pairs[start][0].hit_tokens)
    return f"{name}: reuse beats computing anew from a hit of {tokens} tokens on"


def _where_time_goes(own: Sequence[Point]) -> Iterator[Said]:
    """At the longest hit that has parts: the share of loading, and what is largest in it."""
    told = [point for point in own if point.parts is not None and point.hit_tokens]
    if not told:
        return
    point = told[-1]
    assert point.parts is not None
    loading = {name: _part_s(point.parts, name) for name in LOADING}
    total_s = sum(loading.values())
    largest = max(loading, key=lambda name: loading[name])
    yield Said(
        f"{point.name}, {_there(point)}: loading KV is {total_s / _ttft_s(point):.0%} of TTFT: "
        + ", ".join(f"{name} {_ms(value_s)}" for name, value_s in loading.items())
        + f"; the first step is {_ms(point.parts.first_step_s)}, and the way to the scheduler "
        f"{_ms(point.parts.arrival_s)}",
        point.how,
    )
    yield Said(
        f"{point.name}: the largest part of loading is {largest}, {loading[largest] / total_s:.0%} "
        "of it",
        point.how,
    )
    if point.loaded_bytes:
        yield Said(
            f"{point.name}: {point.loaded_bytes / 1e6:.4g} MB a prompt in the transfer, "
            f"{_rate(point)} GB/s",
            point.how,
        )


def table_of(points: Sequence[Point]) -> Table:
    """A row a set-up and length of hit."""
    rows: list[list[Cell]] = []
    for point in points:
        parts = point.parts
        times: list[Cell] = [None] * len(NAMES)
        share: Cell = None
        if parts is not None:
            times = [getattr(parts, field) * _MS for field in FIELDS]
            share = 100.0 * parts.loading_s / _ttft_s(point)
        rows.append(
            [
                point.name,
                format_tokens(point.hit_tokens),
                100.0 * point.hit_tokens / point.run.isl,
                float(len(point.ttft)),
                point.ttft.percentile(50),
                point.mean_ttft_s * _MS,
                point.ttft.percentile(99),
                *times,
                share,
                point.loaded_bytes / 1e6 if point.has_store else None,
                _gb_per_s(point),
                point.how,
            ]
        )
    return Table(
        title="TTFT by what is there of the prompt, and its parts (means)",
        columns=[
            Column("set-up"),
            Column("tokens there"),
            Column("of prompt", "%"),
            Column("prompts"),
            Column("TTFT P50", "ms"),
            Column("mean", "ms"),
            Column("P99", "ms"),
            *(Column(name, "ms") for name in NAMES),
            Column("loading", "% of TTFT"),
            Column("loaded", "MB"),
            Column("transfer", "GB/s"),
            Column("how"),
        ],
        rows=rows,
    )


def figures_of(points: Sequence[Point]) -> Iterator[Figure]:
    """TTFT against the length of hit, and where the time goes in each store."""
    names = _names(points)
    if not names:
        return
    ticks = [_thousands(hit) for hit in sorted({point.hit_tokens for point in points})]
    if len(ticks) > 1:
        curves = Curves(
            title="TTFT P50",
            x=Axis("tokens of the prompt that are there, in k (1,024)", "linear", ticks),
            y=Axis("TTFT P50, ms"),
            series=[_curve(points, name) for name in names[:MAX_SERIES]],
        )
        yield Figure(
            name="ttft", caption="Time to the first token by length of hit", panels=[curves]
        )
    panels = [bars for name in names if (bars := _bars(points, name)) is not None]
    if panels:
        yield Figure(
            name="parts", caption="Where the time to the first token goes", panels=list(panels)
        )


def _curve(points: Sequence[Point], name: str) -> Curve:
    own = [point for point in points if point.name == name]
    x = [_thousands(point.hit_tokens) for point in own]
    return Curve(name, x, [point.ttft.percentile(50) for point in own], own[0].how)


def _bars(points: Sequence[Point], name: str) -> Bars | None:
    """A bar a length of hit; None where no point has parts."""
    bars = [
        Bar(
            f"{format_tokens(point.hit_tokens)} there",
            [getattr(point.parts, field) * _MS for field in FIELDS],
            point.how,
        )
        for point in points
        if point.name == name and point.parts is not None
    ]
    return Bars(title=name, axis="mean time, ms", parts=list(NAMES), bars=bars) if bars else None


def _names(points: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(point.name for point in points))


def _thousands(num_tokens: int) -> float:
    return num_tokens / 1024


def _part_s(parts: Parts, name: str) -> float:
    return float(getattr(parts, FIELDS[NAMES.index(name)]))


def _ttft_s(point: Point) -> float:
    """The mean that parts are parts of."""
    assert point.parts is not None
    return sum(float(getattr(point.parts, field)) for field in FIELDS)


def _gb_per_s(point: Point) -> float | None:
    """Of what came from a store, in its transfer alone."""
    if point.parts is None or not point.loaded_bytes or point.parts.transfer_s <= 0.0:
        return None
    return gb_per_s(round(point.loaded_bytes), point.parts.transfer_s)


def _rate(point: Point) -> str:
    rate = _gb_per_s(point)
    return "?" if rate is None else format_number(rate)


def _there(point: Point) -> str:
    return f"{format_tokens(point.hit_tokens)} of {format_tokens(point.run.isl)} tokens there"


def _p50(point: Point) -> str:
    return f"{format_number(point.ttft.percentile(50))} ms"


def _ms(value_s: float) -> str:
    return f"{format_number(value_s * _MS)} ms"
