"""Which set-up to take, why, and what would change that.

The choice, in this order: whoever serves more of the loads within the objectives; the fewest GPUs;
the higher goodput at the heaviest load that it serves, figures within ``EVEN`` counting as equal;
one pool of engines before two, because a PD set-up that wins nothing is only more to run; the most
room below the objectives. Where nothing serves even the lightest load, the highest goodput is
named, and that it is not enough.
"""

from collections.abc import Iterator, Sequence

from kvxfer.pd.analysis.slo import Objective
from kvxfer.pd.plan_summary import Candidate, PlannedPoint, Recommendation
from kvxfer.pd.summary import EVEN
from kvxfer.units import format_gpus, format_share

_MOST_CHANGES = 4


def recommend(
    found: Sequence[Candidate], objectives: Sequence[Objective], attained: float
) -> Recommendation | None:
    """Choose one of the candidates; None where there are no objectives.

    Args:
        found: all simulated under the same loads, the lightest first.
        objectives: what their goodput was judged by.
        attained: share of good requests that serving a load takes, 0 to 1.
    """
    if not objectives:
        return None
    most = max(one.serves(attained) for one in found)
    if most == 0:
        return _nothing_serves(found, objectives, attained)
    serving = [one for one in found if one.serves(attained) == most]
    fewest = min(one.num_gpus for one in serving)
    rivals = [one for one in serving if one.num_gpus == fewest]
    chosen = _best(rivals, objectives, most - 1)
    point = chosen.points[most - 1]
    partial = most < len(chosen.points)
    reason = (
        f"no other set-up of {_gpus(chosen)} or fewer meets the objectives with {point.load}"
        if len(rivals) == 1
        else f"the best of {len(rivals)} set-ups of {_gpus(chosen)} that meet the objectives with "
        f"{point.load}, where none of fewer does"
    )
    reason += f": {_good(point)}, {_figures(point)}"
    if partial:
        reason += f"; no set-up serves {chosen.points[most].load}"
    changes = _changes(found, chosen, objectives, attained, most)
    return Recommendation(chosen.name, chosen.num_gpus, f"{reason}.", tuple(changes))


def _best(rivals: Sequence[Candidate], objectives: Sequence[Objective], at: int) -> Candidate:
    """By goodput with that load, then one pool of engines before two, then by room."""
    top = max(_goodput(one.points[at]) for one in rivals)
    even = [one for one in rivals if _goodput(one.points[at]) >= top * (1.0 - EVEN)]
    return min(
        even, key=lambda one: (one.kind == "pd", _excess(one.points[at], objectives), one.name)
    )


def _nothing_serves(
    found: Sequence[Candidate], objectives: Sequence[Objective], attained: float
) -> Recommendation:
    chosen = _best(found, objectives, 0)
    point = chosen.points[0]
    reason = (
        f"with {point.load} {_good(point)} where {format_share(attained)} are asked for, "
        f"{_figures(point)}."
    )
    changes = [f"{chosen.name} would do{_loosened(point, objectives)}."]
    return Recommendation(chosen.name, chosen.num_gpus, reason, tuple(changes), meets=False)


def _changes(
    found: Sequence[Candidate],
    chosen: Candidate,
    objectives: Sequence[Objective],
    attained: float,
    most: int,
) -> list[str]:
    """The nearest set-ups that lose, and by what."""
    texts = [
        *_lighter(found, chosen, objectives, attained, most),
        *_looser(found, chosen, objectives, attained, most),
    ]
    if most < len(chosen.points):
        point = chosen.points[most]
        texts.append(f"{chosen.name} would serve {point.load}{_loosened(point, objectives)}.")
    beyond = sorted({text for point in chosen.points[:most] for text in point.extrapolated})
    if beyond:
        texts.append(f"It stands on what was not measured: {'; '.join(beyond)}.")
    return texts[:_MOST_CHANGES]


def _lighter(
    found: Sequence[Candidate],
    chosen: Candidate,
    objectives: Sequence[Objective],
    attained: float,
    most: int,
) -> Iterator[str]:
    """Under a lighter load alone something cheaper, or of one pool, would do."""
    simpler = [
        one
        for one in found
        if 0 < one.serves(attained) < most
        and (one.num_gpus, one.kind == "pd") < (chosen.num_gpus, chosen.kind == "pd")
    ]
    if simpler:
        reached = max(one.serves(attained) for one in simpler)
        of_reach = [one for one in simpler if one.serves(attained) == reached]
        fewest = min(one.num_gpus for one in of_reach)
        cheap = [one for one in of_reach if one.num_gpus == fewest]
        other = _best(cheap, objectives, reached - 1)
        load = other.points[reached - 1].load
        yield f"Up to {load}, {other.name} on {_gpus(other)} meets the objectives too."


def _looser(
    found: Sequence[Candidate],
    chosen: Candidate,
    objectives: Sequence[Objective],
    attained: float,
    most: int,
) -> Iterator[str]:
    """The best of the other kind, at no more GPUs, would do too, or would with looser objectives.

    Enough requests may meet each objective, and too few of them all: only `PlannedPoint.meets` says
    whether it does.
    """
    others = [one for one in found if one.kind != chosen.kind and one.num_gpus <= chosen.num_gpus]
    if not others:
        return
    at = most - 1
    other = min(
        others,
        key=lambda one: (not one.points[at].meets(attained), _excess(one.points[at], objectives)),
    )
    point = other.points[at]
    if point.meets(attained):
        yield (
            f"{other.name} on {_gpus(other)} meets the objectives with {point.load} too, with "
            f"{_goodput(point):.3g} good requests a second."
        )
    else:
        yield (
            f"{other.name} on {_gpus(other)} would serve {point.load}"
            f"{_loosened(point, objectives)}."
        )


def _excess(point: PlannedPoint, objectives: Sequence[Objective]) -> float:
    """The worst ratio of what is needed to what is allowed."""
    pairs = zip(point.needed_ms, objectives, strict=True)
    return max(needed_ms / one.limit_ms for needed_ms, one in pairs)


def _loosened(point: PlannedPoint, objectives: Sequence[Objective]) -> str:
    wanted = [
        f"{str(one).rpartition(' <= ')[0]} were allowed {_ms(needed_ms)}"
        for needed_ms, one in zip(point.needed_ms, objectives, strict=True)
        if needed_ms > one.limit_ms
    ]
    return f" if {' and '.join(wanted)}" if wanted else " if each request met all of them at once"


def _figures(point: PlannedPoint) -> str:
    summary = point.summary
    texts = [f"TTFT P50 {_ms(summary.ttft.percentile(50))}"]
    if len(summary.itl):  # replies of one token have no gap
        texts.append(f"ITL P99 {_ms(summary.itl.percentile(99))}")
    return ", ".join([*texts, f"{summary.requests_per_s:.3g} requests a second"])


def _good(point: PlannedPoint) -> str:
    goodput = point.summary.goodput
    return f"{format_share(goodput.attained)} of the requests are good" if goodput else ""


def _gpus(one: Candidate) -> str:
    return format_gpus(one.num_gpus)


def _goodput(point: PlannedPoint) -> float:
    goodput = point.summary.goodput
    return goodput.requests_per_s if goodput else 0.0


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100.0 else f"{value:.3g} ms"
