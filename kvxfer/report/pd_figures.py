"""The figures of a benchmark of PD set-ups as cells, for any output to lay out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvxfer.pd.summary import EVEN, Distribution, Load, PointSummary, RunSummary
from kvxfer.report.pd_words import UNRESOLVED, format_ms

DEFAULT_PERCENTILES = (50.0, 90.0, 99.0)


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure as text; ``best`` where it leads those of the other set-ups."""

    text: str
    best: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one set-up, a cell a concurrency of the table."""

    figure: str
    setup: str
    cells: list[Cell]


@dataclass(frozen=True, slots=True)
class _Figure:
    """``text`` is None where a point lacks the figure; ``rank`` is None where no value is best."""

    name: str
    text: Callable[[PointSummary], str | None]
    rank: Callable[[PointSummary], float] | None = None  # the least is the best


_DISTRIBUTIONS: tuple[tuple[str, Callable[[PointSummary], Distribution]], ...] = (
    ("TTFT", lambda point: point.ttft),
    ("first gap", lambda point: point.first_gap),
    ("later gaps", lambda point: point.later_gaps),
    ("ITL", lambda point: point.itl),
    ("TPOT", lambda point: point.tpot),
    ("E2EL", lambda point: point.e2el),
)


def rows_of(run: RunSummary, load: Load, percentiles: Sequence[float]) -> list[Row]:
    """The table of a load; figures that no set-up has are left out."""
    concurrencies = run.concurrencies(load)
    points = {
        one.setup.name: [one.at(load, concurrency) for concurrency in concurrencies]
        for one in run.serving
    }
    points = {name: row for name, row in points.items() if any(row)}
    return [row for figure in _figures(percentiles) for row in _rows(figure, points)]


def _rows(figure: _Figure, points: dict[str, list[PointSummary | None]]) -> Iterator[Row]:
    columns = [[one for one in column if one] for column in zip(*points.values(), strict=True)]
    best = [_best(figure, column) for column in columns]
    for name, row in points.items():
        texts = [None if point is None else figure.text(point) for point in row]
        cells = [
            Cell(text or "", point is not None and point in leaders)
            for text, point, leaders in zip(texts, row, best, strict=True)
        ]
        if any(texts):
            yield Row(figure.name, name, cells)


def _best(figure: _Figure, points: list[PointSummary]) -> list[PointSummary]:
    """Those that lead, among two or more that have the figure; none where all are even."""
    if figure.rank is None:
        return []
    ranks = [(figure.rank(point), point) for point in points if figure.text(point)]
    least = min((rank for rank, _ in ranks), default=0.0)
    leaders = [point for rank, point in ranks if rank - least <= EVEN * abs(least)]
    return leaders if len(leaders) < len(ranks) else []


def _figures(percentiles: Sequence[float]) -> Iterator[_Figure]:
    for name, of in _DISTRIBUTIONS:
        yield from (_percentile(name, of, percent) for percent in percentiles)
    yield _Figure("requests/s", lambda p: f"{p.requests_per_s:.3g}", lambda p: -p.requests_per_s)
    yield _Figure("tokens/s", lambda p: f"{p.output_tokens_per_s:.4g}", _tokens_rank)
    yield _Figure("good req/s", _good, _good_rank)
    yield _Figure("good", lambda p: f"{p.goodput.attained:.0%}" if p.goodput else None)
    yield _Figure("failed", lambda p: f"{p.num_failed}" if p.num_failed else None)
    yield _Figure("stalled", _stalled)
    yield _Figure("expected", _expected)
    yield from (_handover(percent) for percent in percentiles)


def _percentile(name: str, of: Callable[[PointSummary], Distribution], percent: float) -> _Figure:
    def text(point: PointSummary) -> str | None:
        return _cell(of(point), percent)

    return _Figure(f"{name} P{percent:g}", text, lambda point: of(point).percentile(percent))


def _handover(percent: float) -> _Figure:
    def text(point: PointSummary) -> str | None:
        return _cell(point.handover.total, percent) if point.handover else None

    return _Figure(f"hand-over P{percent:g}", text)


def _cell(distribution: Distribution, percent: float) -> str | None:
    if not len(distribution):
        return None
    mark = "" if distribution.resolves(percent) else UNRESOLVED
    return mark + format_ms(distribution.percentile(percent))


def _tokens_rank(point: PointSummary) -> float:
    return -point.output_tokens_per_s


def _good(point: PointSummary) -> str | None:
    return f"{point.goodput.requests_per_s:.3g}" if point.goodput else None


def _good_rank(point: PointSummary) -> float:
    return -point.goodput.requests_per_s if point.goodput else 0.0


def _stalled(point: PointSummary) -> str | None:
    return f"{point.stalls.share:.2%}" if point.stalls else None


def _expected(point: PointSummary) -> str | None:
    expected = point.stalls.expected_share if point.stalls else None
    return None if expected is None else f"{expected:.2%}"
