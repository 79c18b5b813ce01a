"""A benchmark of PD set-ups in words: what its numbers mean, who wins where, what was found."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from kvxfer.pd.summary import EVEN, Contest, Crossing, Load, RunSummary

UNRESOLVED = "~"
_FIGURES = 3  # of a ranking, in a sentence
LEGEND = (
    "Times in ms. TTFT: from sending to the first token. First gap: first to second token, where "
    "a hand-over may hide. ITL: all gaps of all requests, pooled. TPOT: (E2EL - TTFT) / "
    "(tokens - 1).",
    f"{UNRESOLVED}: too few samples for that percentile; the figure is near their largest. "
    f"Bold: the best, and what is within {EVEN:.0%} of it.",
    "Stalled: share of gaps that are longer than 3 median gaps, those that waited for the prefill "
    "of another request; expected of an aggregated engine: (concurrency - 1) * ceil(in / budget) "
    "/ (out - 1), fewer where prefills share a step.",
    "Hand-over: (TTFT - TTFT of the prefill engine alone) + (first gap - median gap), one request "
    "at a time.",
)


def format_ms(value: float) -> str:
    """Three figures, no exponent."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def sentences(run: RunSummary, load: Load) -> list[str]:
    """Who wins where under a load, one sentence a metric, then where ITL curves cross."""
    contests = [one for one in run.contests if one.load == load]
    by_metric = groupby(contests, key=lambda one: one.metric)
    lines = [_verdict(metric, list(group)) for metric, group in by_metric]
    lines += [_crossing(one) for one in run.crossings if one.load == load]
    sizes = {one.setup.num_devices for one in run.serving if one.setup.kind != "external"}
    if lines and len(sizes) > 1:
        each = ", ".join(f"{one.setup.name} {one.setup.num_devices}" for one in run.serving)
        lines.append(f"Not the same number of devices: {each}.")
    return lines


def findings_of(run: RunSummary) -> list[tuple[bool, str]]:
    """Every finding as (serious, text); one that several points share is said once."""
    places: dict[tuple[bool, str], list[str]] = {}
    for place, finding in run.findings():
        places.setdefault((finding.serious, finding.text), []).append(place)
    said = [(serious, f"{_places(at)}: {text}") for (serious, text), at in places.items()]
    return sorted(said, key=lambda one: not one[0])


def setup_lines(run: RunSummary) -> Iterator[tuple[str, str]]:
    """Each set-up and what it was."""
    for one in run.setups:
        setup = one.setup
        engines = f"{setup.num_prefill} x TP{setup.prefill_tp}"
        if setup.num_decode:
            engines += f" prefill, {setup.num_decode} x TP{setup.decode_tp} decode"
        facts = [setup.kind.replace("_", " "), engines, setup.model]
        if setup.connector != "none":
            facts.insert(1, f"connector {setup.connector}")
        if setup.token_budget is not None:
            facts.append(f"budget {setup.token_budget} tokens a step")
        yield setup.name, ", ".join([*facts, *setup.devices, setup.started_at]).rstrip(", ")


def _verdict(metric: str, contests: Sequence[Contest]) -> str:
    """A clause for neighbouring concurrencies with the same leaders; the last one's figures."""
    clauses = []
    for leaders, group in groupby(contests, key=lambda one: one.leaders):
        members = list(group)
        last = members[-1]
        shown = last.ranking[:_FIGURES]
        figures = ", ".join(f"{name} {_figure(last, value)}" for name, value in shown)
        where = _concurrencies([one.concurrency for one in members])
        at = f"at {last.concurrency}: " if len(members) > 1 else ""
        clauses.append(f"{_who(last, leaders)} at {where} ({at}{figures} {last.unit})")
    return f"{metric}: {'; '.join(clauses)}."


def _crossing(one: Crossing) -> str:
    return (
        f"At {one.concurrency} concurrent the ITL curves of {one.above} and {one.below} cross: "
        f"{one.below} is lower up to P{one.percent:.1f}, {one.above} beyond."
    )


def _who(contest: Contest, leaders: tuple[str, ...]) -> str:
    if len(leaders) == len(contest.ranking):
        return "even"
    return " and ".join([", ".join(leaders[:-1]), leaders[-1]] if leaders[1:] else leaders)


def _figure(contest: Contest, value: float) -> str:
    return format_ms(value) if contest.unit == "ms" else f"{value:.3g}"


def _concurrencies(values: list[int]) -> str:
    if len(values) == 1:
        return f"{values[0]} concurrent"
    return f"{values[0]} to {values[-1]} concurrent"


def _places(places: list[str]) -> str:
    return places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"
