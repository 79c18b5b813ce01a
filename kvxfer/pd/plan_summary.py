"""What a plan and its validation found, as the report reads it. Times in milliseconds.

The schemas of their files are ``kvxfer.pd.plan/1`` and ``kvxfer.pd.plan-validation/1``: the fields
below, distributions as percentiles (`kvxfer.pd.planner.records`).
"""

from dataclasses import dataclass, field

from kvxfer.pd.summary import PointSummary

_ROUNDING = 1e-12  # of shares: 99.9 / 100 is a little more than 999 / 1000


@dataclass(frozen=True, slots=True)
class PlannedPoint:
    """One set-up under one load, as predicted.

    Args:
        load: what the load is called.
        concurrency: requests in flight of a closed loop, None for a trace that keeps its own time.
        summary: the figures, as of a measured point.
        extrapolated: what of it lies beyond the measurements, a text each.
        busy: share of the time that the busiest engine ran steps, 0 to 1.
        needed_ms: for each objective of the plan, the limit that the wanted share of the requests
            would meet.
    """

    load: str
    concurrency: int | None
    summary: PointSummary
    extrapolated: tuple[str, ...]
    busy: float
    needed_ms: tuple[float, ...] = ()

    def meets(self, attained: float) -> bool:
        """Whether at least that share of the requests, 0 to 1, met every objective."""
        goodput = self.summary.goodput
        return goodput is not None and goodput.attained >= attained * (1.0 - _ROUNDING)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A set-up and its points, by load.

    Args:
        name: ``agg-2xtp4`` or ``pd-1xtp4+1xtp4``, prefill before decode, and what else sets it
            apart.
        kind: ``aggregated`` or ``pd``.
        num_gpus: of all its engines.
        description: the same in words.
        points: one a load, in the order of the plan's loads.
    """

    name: str
    kind: str
    num_gpus: int
    description: str
    points: tuple[PlannedPoint, ...]

    def serves(self, attained: float) -> int:
        """How many loads it serves within the objectives before the first that it does not."""
        for at, point in enumerate(self.points):
            if not point.meets(attained):
                return at
        return len(self.points)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The set-up to take.

    Args:
        name: of the candidate.
        num_gpus: what it costs.
        reason: why this one, in a sentence.
        changes: what would make another one the choice, a sentence each.
        meets: whether it serves a load within the objectives, and is not only the closest.
    """

    name: str
    num_gpus: int
    reason: str
    changes: tuple[str, ...]
    meets: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Candidates under loads, and which to take.

    Args:
        model: whose KV moves.
        engine: what the steps' costs are of, and where they come from.
        transfer: where the transfers' times come from, None where they were taken as free.
        loads: what each load is called, the lightest first.
        objectives: what makes a request good, a text each.
        attained: share of the requests that must be good for a set-up to serve a load, 0 to 1.
        candidates: by GPUs, then by name.
        skipped: set-ups that could not be simulated, and why.
        recommendation: None where there are no objectives to choose by.
    """

    model: str
    engine: str
    transfer: str | None
    loads: tuple[str, ...]
    objectives: tuple[str, ...]
    attained: float
    candidates: tuple[Candidate, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    recommendation: Recommendation | None = None

    def candidate(self, name: str) -> Candidate:
        """The candidate of that name."""
        return next(one for one in self.candidates if one.name == name)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure as measured and as predicted; times in ms, rates a second.

    ``resolved``: enough was measured for that percentile; else the figure is near the largest.
    """

    figure: str
    measured: float
    predicted: float
    resolved: bool = True

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedPoint:
    """One measured point and what was predicted of it.

    Args:
        setup: its name.
        load: what was sent.
        fitted: whether the engine's costs were fitted to this very point, so that it proves little.
        comparisons: figure by figure.
        extrapolated: as of `PlannedPoint`.
    """

    setup: str
    load: str
    fitted: bool
    comparisons: tuple[Comparison, ...]
    extrapolated: tuple[str, ...] = field(default=())
