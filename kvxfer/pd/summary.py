"""What the analysis of a benchmark's records finds, as the report reads it. Times in milliseconds.

TTFT runs from sending a request to its first token, a gap from one token to the next. The first gap
of a request is kept apart, because that is where a hand-over between engines hides when a proxy
answers with the prefill engine's token; ITL is all gaps of all requests pooled, as vLLM has it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvxfer.pd.result import PDPoint, PDSetup
from kvxfer.units import format_tokens

Floats = npt.NDArray[np.float64]

EVEN = 0.05
"""Figures closer than this to the best count as even: one run says no more."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sample of times, in milliseconds, ascending."""

    values_ms: Floats

    @classmethod
    def of(cls, values_ms: Floats) -> "Distribution":
        """The distribution of values in any order."""
        return cls(np.sort(values_ms))

    def __len__(self) -> int:
        return len(self.values_ms)

    def percentile(self, percent: float) -> float:
        """Linear between the samples, as numpy's default and vLLM's; NaN where there are none."""
        return float(np.percentile(self.values_ms, percent)) if len(self) else float("nan")

    def resolves(self, percent: float) -> bool:
        """Whether at least one sample lies above that percentile; else it is the largest one."""
        return len(self) * (100.0 - percent) >= 100.0

    def share_above(self, limit_ms: float) -> float:
        """Share of the samples above ``limit_ms``, 0 to 1; NaN where there are none."""
        if not len(self):
            return float("nan")
        above = len(self) - int(np.searchsorted(self.values_ms, limit_ms, side="right"))
        return above / len(self)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a measurement that a reader has to know.

    ``serious``: its figures cannot be taken as they are.
    """

    text: str
    serious: bool


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met every objective: how many of those sent, and how many a second."""

    num_good: int
    num_sent: int
    requests_per_s: float

    @property
    def attained(self) -> float:
        """0 to 1."""
        return self.num_good / self.num_sent


@dataclass(frozen=True, slots=True)
class Stalls:
    """Gaps that waited for another request's prefill: longer than ``limit_ms``.

    ``expected_share`` is the closed form for an engine that prefills and decodes, None where that
    says nothing of the set-up.
    """

    limit_ms: float
    share: float
    expected_share: float | None


@dataclass(frozen=True, slots=True)
class Handover:
    """What the hand-over cost each request, at one request at a time.

    ``prefill_ms``: TTFT above the prefill engine's own; ``gap_ms``: first gap above the median gap;
    ``total``: their sum.
    """

    prefill_ms: Distribution
    gap_ms: Distribution
    total: Distribution


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens in and out of a request, and how requests arrive, as ``PDPoint`` has it."""

    isl: int
    osl: int
    request_rate: float | None = None
    burstiness: float = 1.0
    trace: str = ""

    @classmethod
    def of(cls, point: PDPoint) -> "Load":
        """That of a point."""
        return cls(point.isl, point.osl, point.request_rate, point.burstiness, point.trace)

    def __str__(self) -> str:
        """``8k in, 1k out, 2 requests/s, burstiness 0.5``."""
        parts = [f"{format_tokens(self.isl)} in, {format_tokens(self.osl)} out"]
        if self.request_rate is not None:
            parts.append(f"{self.request_rate:g} requests/s")
        if self.burstiness != 1.0:
            parts.append(f"burstiness {self.burstiness:g}")
        if self.trace:
            parts.append(f"trace {self.trace}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PointSummary:
    """One set-up under one load."""

    load: Load
    concurrency: int
    num_sent: int
    num_failed: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft: Distribution
    first_gap: Distribution
    later_gaps: Distribution
    itl: Distribution
    tpot: Distribution
    e2el: Distribution
    stalls: Stalls | None = None
    goodput: Goodput | None = None
    handover: Handover | None = None
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SetupSummary:
    """A set-up and its points, by load and concurrency; findings that belong to no point."""

    setup: PDSetup
    points: list[PointSummary]
    findings: list[Finding] = field(default_factory=list)

    def at(self, load: Load, concurrency: int) -> PointSummary | None:
        """The point of that load and concurrency, if it was measured."""
        for point in self.points:
            if (point.load, point.concurrency) == (load, concurrency):
                return point
        return None


@dataclass(frozen=True, slots=True)
class Contest:
    """Set-ups under one load by one metric: (set-up, figure in ``unit``), the best first."""

    metric: str
    unit: str
    load: Load
    concurrency: int
    ranking: list[tuple[str, float]]

    @property
    def leaders(self) -> tuple[str, ...]:
        """The best and those that are even with it, by name."""
        best = self.ranking[0][1]
        close = (name for name, value in self.ranking if abs(value - best) <= EVEN * abs(best))
        return tuple(sorted(close))


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where the ITL of two set-ups crosses for the last time: ``above`` is lower from there on."""

    load: Load
    concurrency: int
    percent: float
    below: str
    above: str


@dataclass(frozen=True, slots=True)
class RunSummary:
    """All set-ups of a run and how they compare.

    ``objectives``: what the goodput was judged by, a text each. ``contests``: by load, metric and
    concurrency, where two set-ups or more were measured.
    """

    setups: list[SetupSummary]
    objectives: list[str]
    contests: list[Contest] = field(default_factory=list)
    crossings: list[Crossing] = field(default_factory=list)

    @property
    def serving(self) -> list[SetupSummary]:
        """Those that answer whole requests: all but engines that prefill only."""
        return [one for one in self.setups if one.setup.kind != "prefill_only" and one.points]

    def loads(self) -> list[Load]:
        """Loads of the serving set-ups, longest prompts and highest rates first."""
        found = {point.load for one in self.serving for point in one.points}
        return sorted(found, key=_heaviest_first)

    def concurrencies(self, load: Load) -> list[int]:
        """At which any serving set-up was measured under ``load``, ascending."""
        points = (point for one in self.serving for point in one.points)
        return sorted({point.concurrency for point in points if point.load == load})

    def findings(self) -> Iterator[tuple[str, Finding]]:
        """Every finding, and where it was made."""
        for one in self.setups:
            yield from ((one.setup.name, finding) for finding in one.findings)
            for point in one.points:
                where = f"{one.setup.name}, {point.load}, {point.concurrency} concurrent"
                yield from ((where, finding) for finding in point.findings)

    @property
    def failed(self) -> bool:
        """Whether a finding is serious."""
        return any(finding.serious for _, finding in self.findings())


def _heaviest_first(load: Load) -> tuple[float, float, float, float, str]:
    rate = float("inf") if load.request_rate is None else load.request_rate
    return -load.isl, -load.osl, -rate, load.burstiness, load.trace
