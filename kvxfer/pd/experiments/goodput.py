"""Goodput: what is left of a throughput when requests must meet limits.

The articles' example is a system of 10 requests a second of which 3 meet TTFT <= 200 ms and
ITL <= 50 ms. Here limits are tightened on a run until 30 % of its requests are good. A request's
ITL is its longest gap; ``vllm bench serve --goodput`` takes ttft, tpot and e2el alone, and a mean
over a reply (TPOT) does not see one long gap.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvxfer.pd.analysis.slo import judge
from kvxfer.pd.experiment_result import (
    MAX_SERIES,
    Axis,
    Cell,
    Column,
    Curve,
    Curves,
    ExperimentResult,
    Figure,
    How,
    Said,
    Source,
    Table,
)
from kvxfer.pd.experiments.base import Experiment
from kvxfer.pd.experiments.context import Context
from kvxfer.pd.experiments.options import Options
from kvxfer.pd.experiments.runs import environment_of, findings_of
from kvxfer.pd.experiments.served import Served, heaviest, served_points
from kvxfer.pd.load.plan import LoadPlan
from kvxfer.pd.summary import Floats
from kvxfer.units import format_number

_SHARE: Final = 0.3  # of good requests: 3 of the articles' 10
_GRID: Final = 8  # limits of each kind, in a table
_LINE: Final = 40  # and of a line


@dataclass(frozen=True, slots=True)
class Point:
    """The requests of one point: float64 [completed requests] each, in milliseconds.

    A reply of one token has no gap, and meets every limit of one.
    """

    served: Served
    ttft_ms: Floats
    longest_ms: Floats
    tpot_ms: Floats

    @classmethod
    def of(cls, served: Served) -> "Point":
        """From the replies."""
        replies = served.replies.completed
        return cls(
            served,
            np.array([one.ttft_ms for one in replies], np.float64),
            np.array([one.gaps_ms.max(initial=0.0) for one in replies], np.float64),
            np.array([one.tpot_ms or 0.0 for one in replies], np.float64),
        )

    @property
    def num_sent(self) -> int:
        """Failed ones too; they are never good."""
        return len(self.ttft_ms) + len(self.served.replies.failed)

    @property
    def requests_per_s(self) -> float:
        """Throughput of completed requests."""
        return len(self.ttft_ms) / self.served.duration_s

    def share(self, ttft_ms: float = math.inf, longest_ms: float = math.inf) -> float:
        """Of the requests sent, those within both limits: 0 to 1."""
        good = (self.ttft_ms <= ttft_ms) & (self.longest_ms <= longest_ms)
        return float(good.sum()) / self.num_sent

    def goodput(self, ttft_ms: float = math.inf, longest_ms: float = math.inf) -> float:
        """Requests within both limits, a second."""
        return self.share(ttft_ms, longest_ms) * self.num_sent / self.served.duration_s


@dataclass(frozen=True, slots=True)
class Example:
    """Two limits, as tight as each other, that leave ``share`` of the requests."""

    ttft_ms: float
    longest_ms: float
    share: float


def tightened(point: Point, share: float) -> Example:
    """Tighten both limits step by step, each so that it alone is met by as many, down to ``share``.

    Limits are rounded to three figures, and judged as rounded.
    """
    example = Example(math.inf, math.inf, 1.0)
    for percent in np.linspace(100.0, 0.0, 201):
        ttft_ms, longest_ms = (
            _rounded(float(np.percentile(values, percent, method="inverted_cdf")))
            for values in (point.ttft_ms, point.longest_ms)
        )
        example = Example(ttft_ms, longest_ms, point.share(ttft_ms, longest_ms))
        if example.share <= share:
            break
    return example


def _rounded(value_ms: float) -> float:
    """Three figures, upwards, so that what gave the limit meets it."""
    if value_ms <= 0.0:
        return value_ms
    unit = 10.0 ** (math.floor(math.log10(value_ms)) - 2)
    return round(math.ceil(value_ms / unit - 1e-9) * unit, 6)


def _conduct(context: Context) -> ExperimentResult:
    run = context.run()
    points = [
        point for one in heaviest(served_points(context)) if len((point := Point.of(one)).ttft_ms)
    ]
    how = context.how
    examples = [(point, tightened(point, _SHARE)) for point in points]
    return ExperimentResult(
        name=EXPERIMENT.name,
        question=EXPERIMENT.question,
        scale=context.size,
        environment=environment_of(run),
        sources=[Source(str(point.served), how) for point in points],
        findings=[
            *(Said(_example_text(point, example), how) for point, example in examples),
            *_asked(context, points),
        ],
        tables=[_examples(examples, how), *(_grid(point, how) for point in points)],
        figures=[_figure(points, how)],
        notes=findings_of(run, serious=False),
        faults=findings_of(run, serious=True),
    )


def _example_text(point: Point, example: Example) -> str:
    left = example.share * point.num_sent / point.served.duration_s
    by_mean = float((point.tpot_ms <= example.longest_ms).mean())
    return (
        f"{point.served}: {format_number(point.requests_per_s)} requests/s become "
        f"{format_number(left)} ({example.share:.0%}) within TTFT <= "
        f"{format_number(example.ttft_ms)} ms and a longest gap <= "
        f"{format_number(example.longest_ms)} ms; TTFT alone leaves "
        f"{point.share(ttft_ms=example.ttft_ms):.0%}, the gap alone "
        f"{point.share(longest_ms=example.longest_ms):.0%}. A limit of the mean gap (TPOT) at that "
        f"value would call {by_mean:.0%} good"
    )


def _asked(context: Context, points: Sequence[Point]) -> Iterator[Said]:
    """What the objectives of ``--slo`` leave."""
    objectives = context.options.objectives
    wanted = " and ".join(map(str, objectives))
    for point in points if objectives else ():
        found = judge(point.served.replies, objectives, point.served.duration_s)
        yield Said(
            f"{point.served}: {wanted} leaves {format_number(found.requests_per_s)} of "
            f"{format_number(point.requests_per_s)} requests/s ({found.attained:.0%})",
            context.how,
        )


def _examples(examples: Sequence[tuple[Point, Example]], how: How) -> Table:
    rows: list[list[Cell]] = [
        [
            str(point.served),
            point.requests_per_s,
            example.ttft_ms,
            example.longest_ms,
            100.0 * example.share,
            example.share * point.num_sent / point.served.duration_s,
        ]
        for point, example in examples
    ]
    return Table(
        title=f"Limits that leave {_SHARE:.0%} of the requests, as 10 requests/s become 3",
        how=how,
        columns=[
            Column("point"),
            Column("throughput", "requests/s"),
            Column("TTFT limit", "ms"),
            Column("limit of the longest gap", "ms"),
            Column("good", "%"),
            Column("goodput", "requests/s"),
        ],
        rows=rows,
    )


def _grid(point: Point, how: How) -> Table:
    """Goodput under each pair of limits."""
    ttft_limits, gap_limits = (
        _limits(values, _GRID) for values in (point.ttft_ms, point.longest_ms)
    )
    rows: list[list[Cell]] = [
        [
            f"TTFT <= {format_number(ttft_ms)} ms",
            *(point.goodput(ttft_ms, gap) for gap in gap_limits),
        ]
        for ttft_ms in ttft_limits
    ]
    columns = [Column(f"gap <= {format_number(gap)} ms") for gap in gap_limits]
    return Table(
        title=f"Goodput in requests/s by limits of TTFT and longest gap, {point.served}",
        how=how,
        columns=[Column("limits"), *columns],
        rows=rows,
    )


def _limits(values_ms: Floats, count: int) -> list[float]:
    """Ascending limits that are met by more and more of the requests, the last one by all."""
    percents = np.linspace(100.0 / count, 100.0, count)
    found = np.percentile(values_ms, percents, method="inverted_cdf")
    return sorted({_rounded(float(value)) for value in found})


def _figure(points: Sequence[Point], how: How) -> Figure:
    """Goodput over each limit alone, and over both where they are as tight as each other."""
    shown = points[:MAX_SERIES]
    panels = [
        Curves(
            title="TTFT alone",
            x=Axis("limit of TTFT, ms", "log"),
            y=Axis("goodput, requests/s"),
            series=[_line(point, point.ttft_ms, "ttft_ms", how) for point in shown],
        ),
        Curves(
            title="Longest gap alone",
            x=Axis("limit of a request's longest gap, ms", "log"),
            y=Axis("goodput, requests/s"),
            series=[_line(point, point.longest_ms, "longest_ms", how) for point in shown],
        ),
    ]
    return Figure(
        name="goodput",
        caption="Goodput as a limit is tightened, from right to left",
        panels=list(panels),
    )


def _line(point: Point, values_ms: Floats, limit: str, how: How) -> Curve:
    limits = [0.9 * float(values_ms.min()), *_limits(values_ms, _LINE)]  # the first none meets
    goods = [point.goodput(**{limit: value}) for value in limits]
    return Curve(point.served.setup, limits, goods, how)


EXPERIMENT: Final = Experiment(
    name="goodput",
    question="How many of the requests that a system serves meet limits of TTFT and ITL: what "
    "makes 10 requests a second 3?",
    sizes={
        "quick": Options(
            setups=("agg=aggregated",),
            load=LoadPlan(isl=(256,), osl=(16,), concurrency=(4,), prompts_per_concurrency=4),
        ),
        "cpu": Options(
            setups=("agg=aggregated", "pd=pd"),
            load=LoadPlan(isl=(1024,), osl=(64,), concurrency=(8,), prompts_per_concurrency=8),
        ),
        "gpu": Options(
            model="dummy:gpt-oss-120b",
            setups=("agg=aggregated,tp=2", "pd=pd"),
            load=LoadPlan(isl=(8192,), concurrency=(32,)),
            engine="gpt-oss-120b-h200",
        ),
    },
    conduct=_conduct,
    shares_setups=True,
)
