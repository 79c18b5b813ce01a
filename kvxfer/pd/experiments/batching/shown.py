"""What was found of each way, as sentences, a table and drawings."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from kvxfer.pd.experiment_result import Bar, Bars, Cell, Column, Figure, How, Said, Table
from kvxfer.pd.experiments.batching.blocking import Held
from kvxfer.pd.experiments.batching.ways import Way
from kvxfer.pd.experiments.panels import number
from kvxfer.units import format_number

_OFF_SCALE: Final = 10.0
"""Bars above so many times the median would hide the others: they are in the table alone."""


@dataclass(frozen=True, slots=True)
class Row:
    """A way, how its figures were got, and them."""

    way: Way
    how: How
    num_devices: int
    held: Held


def findings_of_rows(rows: Sequence[Row]) -> Iterator[Said]:
    """Who holds up least among rows of one kind and number of devices; then each row."""
    for how in ("measured", "simulated"):
        for count in sorted({one.num_devices for one in rows}):
            rivals = [one for one in rows if (one.how, one.num_devices) == (how, count)]
            rivals = [one for one in rivals if len(one.held.gaps) and len(one.held.ttft)]
            if len(rivals) < 2:
                continue
            gap = min(rivals, key=lambda one: one.held.gaps.percentile(99))
            ttft = min(rivals, key=lambda one: one.held.ttft.percentile(90))
            devices = f"{count} device{'' if count == 1 else 's'}"
            yield Said(
                f"of {len(rivals)} ways on {devices}, beside a long prompt the shortest gaps are "
                f"those of {gap.way.name} ({_figures_of(gap)}), and short prompts wait least with "
                f"{ttft.way.name} ({_figures_of(ttft)})",
                gap.how,
            )
    yield from map(_told, rows)


def _told(one: Row) -> Said:
    held = one.held
    return Said(
        f"{one.way.name}: beside a long prompt, short ones wait {_ms(held.ttft.percentile(90))} "
        f"for their first token (P90; {_ms(held.calm_ttft.percentile(90))} otherwise), gaps reach "
        f"{_ms(held.gaps.percentile(99))} (P99; {_ms(held.calm_gaps.percentile(99))} otherwise), "
        f"and the long prompt takes {_ms(held.long_ttft.percentile(50))}",
        one.how,
    )


def table_of(rows: Sequence[Row]) -> Table:
    """A row a way and how it was got."""
    cells: list[list[Cell]] = []
    for one in rows:
        held = one.held
        figures = (
            held.ttft.percentile(50),
            held.ttft.percentile(90),
            held.calm_ttft.percentile(90),
            held.gaps.percentile(50),
            held.gaps.percentile(99),
            held.calm_gaps.percentile(99),
            held.long_ttft.percentile(50),
        )
        cells.append(
            [
                one.way.name,
                one.how,
                float(one.num_devices),
                float(len(held.ttft)),
                *map(number, figures),
            ]
        )
    return Table(
        title="Held up by a long prompt, and otherwise (calm)",
        columns=[
            Column("batching"),
            Column("how"),
            Column("devices"),
            Column("short ones held up"),
            Column("their TTFT P50", "ms"),
            Column("their TTFT P90", "ms"),
            Column("calm TTFT P90", "ms"),
            Column("gaps P50", "ms"),
            Column("gaps P99", "ms"),
            Column("calm gaps P99", "ms"),
            Column("long prompt's TTFT", "ms"),
        ],
        rows=cells,
    )


def figures_of(rows: Sequence[Row]) -> Iterator[Figure]:
    """Measured and simulated ways apart: their milliseconds are of two engines."""
    for how in ("measured", "simulated"):
        shown = [one for one in rows if one.how == how]
        panels = [
            bars
            for title, axis, figure in (
                ("Short prompts", "TTFT P90 beside a long prompt, ms", _short_ms),
                ("Running requests", "gaps P99 beside a long prompt, ms", _gap_ms),
                ("The long prompt", "its TTFT P50, ms", _long_ms),
            )
            if (bars := _bars(shown, title, axis, figure)) is not None
        ]
        if panels:
            yield Figure(
                name=f"blocking-{how}",
                caption=f"Who a long prompt holds up, {how}",
                panels=list(panels),
            )


def _bars(
    rows: Sequence[Row], title: str, axis: str, figure: Callable[[Row], float]
) -> Bars | None:
    """A bar a way; None where there is no figure."""
    values = [figure(one) for one in rows if figure(one) == figure(one)]  # no NaN
    if not values:
        return None
    most = _OFF_SCALE * median(values)
    shown = [one for one in rows if figure(one) <= most]
    hidden = [one.way.name for one in rows if figure(one) > most]
    if hidden:
        title += f" (off the scale, in the table: {', '.join(hidden)})"
    bars = [Bar(one.way.name, [figure(one)], one.how) for one in shown]
    return Bars(title=title, axis=axis, parts=[title], bars=bars)


def _short_ms(one: Row) -> float:
    return one.held.ttft.percentile(90)


def _gap_ms(one: Row) -> float:
    return one.held.gaps.percentile(99)


def _long_ms(one: Row) -> float:
    return one.held.long_ttft.percentile(50)


def _figures_of(one: Row) -> str:
    gap_ms, ttft_ms = one.held.gaps.percentile(99), one.held.ttft.percentile(90)
    return f"gaps P99 {_ms(gap_ms)}, TTFT P90 of short prompts {_ms(ttft_ms)}"


def _ms(value: float) -> str:
    return "nothing" if value != value else f"{format_number(value)} ms"
