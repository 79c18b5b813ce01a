"""What the measured load alone says to change, where nothing can be predicted."""

from collections.abc import Sequence
from typing import Final

from kvxfer.pd.advise.observation import Observation
from kvxfer.pd.advise.targets import Judged

_FULL: Final = 0.7
"""Share of the time with work above which requests queue noticeably: at 0.7 a queue of one server
with Poisson arrivals and equal services holds 0.8 requests (Pollaczek and Khinchine)."""
_ROOM: Final = 0.5
"""Of a limit: a percentile below it has room to save."""


def cure(seen: Observation, judged: Sequence[Judged]) -> str:
    """The change that the broken targets and the busier stage ask for."""
    broken = {one.target.key for one in judged if one.verdict == "broken"}
    if seen.kind == "aggregated":
        return _cure_of_aggregated(seen, broken)
    prefill, decode = seen.stage("prefill"), seen.stage("decode")
    if prefill is None or decode is None:
        return "give more engines"
    busy = prefill.busy or 0.0
    if broken & {"itl", "tpot", "first_gap"}:
        return (
            f"add a decode engine: {_each(decode.in_flight, decode.num_engines)} requests decode "
            f"at once on each of {decode.num_engines}"
        )
    share = _prefill_share(seen)
    if busy >= _FULL or share >= 0.5:
        return (
            f"add a prefill engine: prefill is busy {busy:.0%} of the time, with "
            f"{_each(prefill.in_flight, prefill.num_engines)} requests at once on each of "
            f"{prefill.num_engines}"
        )
    return (
        f"look at hand-over and decode: prefill takes {share:.0%} of the time to the first token "
        f"and is busy {busy:.0%} of the time"
    )


def saving(seen: Observation, judged: Sequence[Judged]) -> str:
    """What could be saved, where every percentile is far below its limit."""
    has_room = all(
        one.found_s is not None and one.found_s.high * 1e3 <= one.target.limit_ms * _ROOM
        for one in judged
    )
    if not has_room:
        return f"keep the set-up: a percentile is above {_ROOM:.0%} of its limit"
    if seen.kind == "aggregated":
        stage = seen.stages[0]
        if stage.num_engines > 1 and _after(stage.busy, stage.num_engines) < _FULL:
            return (
                f"an engine of {stage.num_engines} could be saved: the others would prefill "
                f"{_after(stage.busy, stage.num_engines):.0%} of the time"
            )
        return "a larger load, or cheaper GPUs, would do: every percentile is below half its limit"
    prefill = seen.stage("prefill")
    if prefill is not None and prefill.num_engines > 1:
        after = _after(prefill.busy, prefill.num_engines)
        if after < _FULL:
            return (
                f"a prefill engine of {prefill.num_engines} could be saved: the others would be "
                f"busy {after:.0%} of the time"
            )
    if prefill is not None and prefill.num_engines == 1 and (prefill.busy or 0.0) < 1 - _FULL:
        return (
            f"one engine for both might do: prefill is busy {prefill.busy or 0.0:.0%} of the time, "
            "and every percentile is below half its limit"
        )
    return "keep the set-up: no stage has an engine to spare"


def _cure_of_aggregated(seen: Observation, broken: set[str]) -> str:
    busy = seen.stages[0].busy
    prefilling = "" if busy is None else f"; prompts are in prefill {busy:.0%} of the time"
    queue = seen.histograms.get("queue")
    ttft = seen.histograms.get("ttft")
    if broken & {"itl", "tpot", "first_gap"} and not broken & {"ttft"}:
        return f"lower --max-num-batched-tokens, or separate prefill from decode{prefilling}"
    if queue is not None and ttft is not None and queue.count and ttft.count:
        return (
            f"add an engine: of {ttft.mean * 1e3:.0f} ms to the first token, "
            f"{queue.mean * 1e3:.0f} ms are queueing{prefilling}"
        )
    return f"add an engine{prefilling}"


def _prefill_share(seen: Observation) -> float:
    """Of the mean time to the first token, up to the prefill's answer; 0 where not known."""
    prefill, ttft = seen.histograms.get("prefill"), seen.histograms.get("ttft")
    if prefill is None or ttft is None or not prefill.count or not ttft.count or not ttft.mean:
        return 0.0
    return min(1.0, prefill.mean / ttft.mean)


def _after(busy: float | None, num_engines: int) -> float:
    """Busy share of each engine, once one of them is gone."""
    return 1.0 if busy is None else busy * num_engines / (num_engines - 1)


def _each(in_flight: float, num_engines: int) -> str:
    return f"{in_flight / max(1, num_engines):.3g}"
