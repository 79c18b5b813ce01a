"""From trials to sections, rules and an order. Pure: it measures nothing."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, cast

import msgspec

from kvxfer.sweep.tune.trials import Point, Trials, again_of
from kvxfer.sweep.tune.verdict import Verdict, judge, judge_together
from kvxfer.tuning import DEFAULT_RULE, Check, Memory, Rule, Section

_OUTER_FACTOR = 2  # how far beyond the outermost points a rule still holds


def best_of_all(trials: Trials, names: Iterable[str]) -> str | None:
    """The candidate that gains most over all points and loses at none; None = the default stays.

    For what is chosen once for a connection, whatever it then carries.
    """
    found: dict[str, float] = {}
    for name in names:
        points = [trials.repeats(name, point) for point in trials.points]
        known = [repeats for repeats in points if repeats is not None]
        if not known or len(known) != len(points):
            continue  # it does not work everywhere
        if any(judge(repeats).word == "slower" for repeats in known):
            continue
        verdict = judge_together(known)
        if verdict.word == "gain":
            found[name] = verdict.gain
    return max(found, key=found.__getitem__, default=None)


def best_by_point(
    trials: Trials, names: Sequence[str], *, min_gain: float = 0.0
) -> dict[Point, str]:
    """For each point that gains, the candidate that gains most there.

    Points of the same operation and sizes are one: pairs of ranks are not a rule's key.

    Args:
        trials: the times.
        names: of candidates, the one that costs least first.
        min_gain: what a costlier one must gain on the default, and on those before it.
    """
    best: dict[Point, str] = {}
    for alike in _alike(trials.points):
        gains = {}
        for name in names:
            verdicts = [_verdict(trials, name, point) for point in alike]
            if any(one.word == "slower" for one in verdicts):
                continue
            gain = max(one.gain for one in verdicts)
            if gain > min_gain and any(one.word == "gain" for one in verdicts):
                gains[name] = gain
        if gains:
            enough = 1.0 - (1.0 - max(gains.values())) * (1.0 + min_gain)
            best[alike[0]] = next(name for name, gain in gains.items() if gain >= enough)
    return best


def _alike(points: Iterable[Point]) -> list[list[Point]]:
    groups: dict[tuple[str, int, int], list[Point]] = {}
    for point in points:
        groups.setdefault((point.op, *point.sizes), []).append(point)
    return list(groups.values())


def _verdict(trials: Trials, name: str, point: Point) -> Verdict:
    repeats = trials.repeats(name, point)
    return Verdict("slower", 0.0, 0.0, 0.0, 0.0) if repeats is None else judge(repeats)


def cells(points: Sequence[Point]) -> dict[Point, Rule]:
    """For each point a rule that changes nothing, over the box that is its own.

    Boxes meet half way between neighbouring sizes, in the logarithm, and do not overlap.
    """
    if not points:
        return {}
    runs = _bounds({point.run_bytes for point in points})
    totals = _bounds({point.total_bytes for point in points})
    return {
        point: Rule(
            op=cast(Literal["put", "get"], point.op),
            min_run_bytes=runs[point.run_bytes][0],
            max_run_bytes=runs[point.run_bytes][1],
            min_total_bytes=totals[point.total_bytes][0],
            max_total_bytes=totals[point.total_bytes][1],
        )
        for (point, *_) in _alike(points)
    }


def _bounds(sizes: set[int]) -> dict[int, tuple[int, int]]:
    ordered = sorted(sizes)
    inner = [math.isqrt(low * high) for low, high in pairwise(ordered)]
    edges = [ordered[0] // _OUTER_FACTOR, *inner, ordered[-1] * _OUTER_FACTOR + 1]
    return dict(zip(ordered, pairwise(edges), strict=True))


def merged_rules(cells: Mapping[Point, Rule]) -> tuple[Rule, ...]:
    """The rules that change something."""
    return tuple(rule for rule in cells.values() if changes(rule))


def changes(rule: Rule) -> bool:
    """Whether a rule says anything."""
    return (rule.engine, rule.num_sms) != (DEFAULT_RULE.engine, DEFAULT_RULE.num_sms)


def checks_of(transport: str, memory: Memory, trials: Trials, name: str) -> list[Check]:
    """The validation of a section, point by point."""
    checks = []
    for point in trials.points:
        repeats = trials.repeats(name, point)
        if repeats is None:
            continue
        verdict = judge(repeats)
        checks.append(
            Check(
                transport=transport,
                memory=memory,
                op=cast(Literal["put", "get"], point.op),
                src_tp=point.src_tp,
                dst_tp=point.dst_tp,
                run_bytes=point.run_bytes,
                total_bytes=point.total_bytes,
                default_us=verdict.default_us,
                profile_us=verdict.candidate_us,
                gain=verdict.gain,
                noise=verdict.noise,
                verdict=verdict.word,
            )
        )
    return checks


def take_back(section: Section, checks: Sequence[Check]) -> tuple[Section, list[Check]]:
    """The section without what did not gain once more, and its checks, marked.

    A rule stays where one of its points gained and none was slower. What is chosen for the whole
    connection stays where any point gained, and none without a rule was slower; else all of the
    section goes, since its rules were measured on top of that. What has the default's settings
    anyway stays ``slower``: that is noise, and is to be seen.
    """
    rules_of = [section.rule_for(one.op, one.run_bytes, one.total_bytes) for one in checks]
    judged = list(zip(rules_of, checks, strict=True))
    slower = [rule for rule, one in judged if one.verdict == "slower"]
    gained = [rule for rule, one in judged if one.verdict == "gain"]
    is_of_connection = section.num_threads is not None or bool(section.slots)
    if is_of_connection and (not gained or DEFAULT_RULE in slower):
        nothing = Section(transport=section.transport, memory=section.memory)
        return nothing, [_taken_back(one) for one in checks]
    kept = tuple(rule for rule in section.rules if rule in gained and rule not in slower)
    marked = [
        one if rule is DEFAULT_RULE or rule in kept else _taken_back(one) for rule, one in judged
    ]
    return msgspec.structs.replace(section, rules=kept), marked


def _taken_back(check: Check) -> Check:
    return msgspec.structs.replace(check, verdict="taken back")


def fit_order(default: Sequence[str], trials: Trials) -> tuple[str, ...]:
    """Transports by speed, fastest first; empty where that is the default order.

    One passes another only where it is faster over all points, by the rule of candidates.

    Args:
        default: names in the default order.
        trials: of :func:`kvxfer.sweep.tune.rotation.compare`.
    """
    order: list[str] = []
    for name in default:
        place = len(order)
        while place and _is_faster(trials, name, order[place - 1]):
            place -= 1
        order.insert(place, name)
    return tuple(order) if order != list(default) else ()


def _is_faster(trials: Trials, name: str, other: str) -> bool:
    points = trials.points_of(name)
    repeats = [trials.repeats(name, one, default=other, again=again_of(other)) for one in points]
    known = [one for one in repeats if one is not None]
    return len(known) == len(points) > 0 and judge_together(known).word == "gain"
