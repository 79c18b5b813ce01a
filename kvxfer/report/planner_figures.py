"""A plan's figures as cells, and what to say of them, for any output to lay out."""

from collections.abc import Callable, Iterator

from kvxfer.pd.plan_summary import Candidate, Plan, PlannedPoint, ValidatedPoint
from kvxfer.pd.summary import Distribution, PointSummary
from kvxfer.report.pd_words import UNRESOLVED, format_ms
from kvxfer.units import format_gpus, format_share

EXTRAPOLATED = "*"
LEGEND = (
    "Times in ms, predicted. TTFT: from sending to the first token. First gap: first to second "
    "token, where a hand-over may hide. ITL: all gaps of all requests, pooled. Busy: of the "
    "busiest engine.",
    f"{EXTRAPOLATED}: beyond what was measured; why stands below. {UNRESOLVED}: too few samples "
    "for that percentile.",
)
_DISTRIBUTIONS: tuple[tuple[str, Callable[[PointSummary], Distribution]], ...] = (
    ("TTFT", lambda point: point.ttft),
    ("1st gap", lambda point: point.first_gap),
    ("ITL", lambda point: point.itl),
)
_PERCENTILES = (50.0, 99.0)


def headers(plan: Plan) -> list[str]:
    """The columns of `row_of`."""
    times = [f"{name} P{percent:g}" for name, _ in _DISTRIBUTIONS for percent in _PERCENTILES]
    goodput = ["good", "good/s"] if plan.objectives else []
    return ["set-up", "GPUs", *times, "req/s", *goodput, "busy"]


def row_of(one: Candidate, at: int) -> list[str]:
    """One candidate under load number ``at``."""
    point = one.points[at]
    summary = point.summary
    times = [_time(of(summary), percent) for _, of in _DISTRIBUTIONS for percent in _PERCENTILES]
    name = one.name + (EXTRAPOLATED if point.extrapolated else "")
    cells = [name, str(one.num_gpus), *times, f"{summary.requests_per_s:.3g}"]
    if summary.goodput is not None:
        good = summary.goodput
        cells += [format_share(good.attained), f"{good.requests_per_s:.3g}"]
    return [*cells, f"{point.busy:.0%}"]


def shown(plan: Plan, at: int, most: int) -> list[Candidate]:
    """By GPUs, at most so many of each number, the best first; the recommended one always."""
    chosen = plan.recommendation.name if plan.recommendation else ""
    found: list[Candidate] = []
    for num_gpus in sorted({one.num_gpus for one in plan.candidates}):
        group = [one for one in plan.candidates if one.num_gpus == num_gpus]
        group.sort(key=lambda one: (one.name != chosen, *_rank(one.points[at])))
        found += group[:most]
    return found


def sentences(plan: Plan) -> Iterator[str]:
    """The recommendation, its reason and what would change it."""
    choice = plan.recommendation
    if choice is None:
        yield "Nothing is recommended: give objectives with --slo to have one set-up chosen."
        return
    start = "Take" if choice.meets else "Nothing meets the objectives; closest:"
    yield f"{start} {choice.name} ({format_gpus(choice.num_gpus)}): {choice.reason}"
    yield from choice.changes


def remarks(plan: Plan) -> Iterator[str]:
    """What is extrapolated and what was left out, each said once."""
    texts: dict[str, int] = {}
    for one in plan.candidates:
        for text in {text for point in one.points for text in point.extrapolated}:
            texts[text] = texts.get(text, 0) + 1
    for text, count in sorted(texts.items()):
        yield f"{EXTRAPOLATED} {text} ({count} set-up{'' if count == 1 else 's'})"
    reasons: dict[str, list[str]] = {}
    for name, reason in plan.skipped:
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"left out: {names[0]}{more}: {reason}"


def facts(plan: Plan) -> list[str]:
    """What the plan stands on."""
    lines = [f"engine: {plan.engine}", f"transfers: {plan.transfer or 'taken as free'}"]
    if plan.objectives:
        wanted = " and ".join(plan.objectives)
        share = format_share(plan.attained)
        lines.append(f"good: a request with {wanted}; wanted for {share} of them")
    return lines


def validation_rows(points: list[ValidatedPoint]) -> Iterator[list[str]]:
    """Set-up, load, figure, measured, predicted, error, whether it was fitted to that point."""
    for point in points:
        for one in point.comparisons:
            mark = "" if one.resolved else UNRESOLVED
            measured, predicted = (
                (f"{one.measured:.3g}", f"{one.predicted:.3g}")
                if one.figure == "requests/s"
                else (format_ms(one.measured), format_ms(one.predicted))
            )
            where = point.load + (EXTRAPOLATED if point.extrapolated else "")
            fitted = "fitted" if point.fitted else ""
            error = f"{one.error:+.1%}"
            yield [point.setup, where, one.figure, mark + measured, predicted, error, fitted]


def _rank(point: PlannedPoint) -> tuple[float, float]:
    goodput = point.summary.goodput
    good = goodput.requests_per_s if goodput else point.summary.requests_per_s
    return -good, point.summary.itl.percentile(99)


def _time(distribution: Distribution, percent: float) -> str:
    if not len(distribution):
        return ""
    mark = "" if distribution.resolves(percent) else UNRESOLVED
    return mark + format_ms(distribution.percentile(percent))
