"""The costs of an engine from records of ``kvxfer pd bench``, as those of a running one.

A prefill engine alone gives the prefill: one request at a time is ``request_s`` and its steps, a
full queue its steps alone. Points at a rate or of a trace give none: their queue is neither always
full nor always empty. The replies of whole requests give the decode steps: gaps, by the number
of requests that decoded meanwhile. A reply's first two gaps are left out (the hand-over falls into
one, and asynchronous scheduling hands out two tokens at once), and so are stalls, as
`kvxfer.pd.analysis.stalls` knows them.

Benchmarks often have one length of prompt alone, which tells no cost of a token from one of a step,
nor one of context from one of a sequence. Two facts then stand in, as rows: a prompt of one token
is computed as a decode step is; and a step reads the weights once, however few sequences it has, so
that what these add is their context. The attention of prompts of one length is part of the cost of
their tokens.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvxfer.errors import InvalidUsage
from kvxfer.pd.analysis.replies import ONE_READ_MS, Replies, Reply, replies_of
from kvxfer.pd.analysis.stalls import STALL_FACTOR
from kvxfer.pd.planner.decode_gaps import MOST_JOINED
from kvxfer.pd.planner.engine_model import EngineModel, pairs_of
from kvxfer.pd.planner.fitting import StepRow
from kvxfer.pd.planner.profile_live import Profile
from kvxfer.pd.result import (
    PDPoint,
    PDSetup,
    bench_path,
    find_points,
    find_setups,
    load_point,
    load_setup,
)
from kvxfer.pd.summary import Floats
from kvxfer.pd.vllm_json import BenchResult, load_bench

_LEAST_GAPS = 100  # of a number of sequences, to count
_ONE_READ_S = ONE_READ_MS * 1e-3
_SKIPPED_GAPS = 2
_TOKEN_BUDGET = 8192  # where a record does not say
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measured:
    """One point of a run: how it was made, and its replies.

    ``sent_s``, seconds, and ``num_prompt_tokens`` of every request, by :attr:`Reply.index`.
    """

    setup: PDSetup
    point: PDPoint
    sent_s: Floats
    num_prompt_tokens: list[int]
    replies: list[Reply]
    duration_s: float

    @property
    def label(self) -> str:
        """``SETUP/c16-i8192-o128``, as its files are called."""
        return f"{self.setup.name}/{self.point.stem}"

    @property
    def is_closed_loop(self) -> bool:
        """Whether the next request was sent when one ended, at no rate and of no trace."""
        return self.point.request_rate is None and not self.point.trace


def read_points(folder: Path) -> list[Measured]:
    """Every whole point of a run that says what an engine took; of the others a warning says why.

    Those are points with failed requests, without requests, or of a client that kept no start
    times.

    Raises:
        InvalidUsage: there is none, or a record cannot be read.
    """
    found = []
    for setup_folder in find_setups(folder):
        setup = load_setup(setup_folder)
        for path in find_points(setup_folder)[0]:
            point = load_point(path)
            result = load_bench(bench_path(setup_folder, point))
            replies = replies_of(result)
            reason = _unfit(result, replies)
            if reason:
                _log.warning("%s/%s %s, so it is left out", setup.name, point.stem, reason)
                continue
            sent_s = np.array(result.start_times, np.float64)
            lengths = [length or point.isl for length in result.input_lens]
            found.append(
                Measured(setup, point, sent_s, lengths, replies.completed, result.duration)
            )
    if not found:
        raise InvalidUsage(f"{folder} has no whole point with start times; measure it again")
    return found


def _unfit(result: BenchResult, replies: Replies) -> str:
    """Why a point says nothing; empty where it does."""
    if result.start_times is None:
        return "has no start times"
    if replies.failed:
        return f"has {len(replies.failed)} failed of {result.num_requests} requests"
    return "" if replies.completed else "has no request"


def profile_of(points: Sequence[Measured], only: Collection[str] | None = None) -> Profile:
    """Rows of steps from points of one model and parallel size.

    Args:
        points: of one run.
        only: labels of the points to take; None: all.

    Raises:
        InvalidUsage: a label names no point, the points differ in model or parallel size, none of
            the prefill engine was in a closed loop, or messages came together in each that decodes.
    """
    taken = taken_of(points, only)
    kinds = {(one.setup.model, one.setup.prefill_tp, _decode_tp(one.setup)) for one in taken}
    if len({(model, tp) for model, *sizes in kinds for tp in sizes}) > 1:
        raise InvalidUsage(
            f"these points are of {len(kinds)} models or TP sizes; name those of one with --points"
        )
    found = Profile()
    _add_prefills(found, [one for one in taken if one.setup.kind == "prefill_only"])
    replies = [reply for one in taken for reply in one.replies if len(reply.gaps_ms) > 1]
    if replies:
        first_ms = [float(reply.gaps_ms[0]) for reply in replies]
        found.see_first_gaps(first_ms, np.concatenate([reply.gaps_ms[1:] for reply in replies]))
    _add_decodes(found, [one for one in taken if one.point.osl > 1])
    found.rows += list(_anchors(found.rows))
    return found


def taken_of(points: Sequence[Measured], only: Collection[str] | None) -> list[Measured]:
    """The points that labels name; None: all.

    Raises:
        InvalidUsage: a label names none.
    """
    labels = [one.label for one in points]
    unknown = sorted(set(only or ()) - set(labels))
    if unknown:
        raise InvalidUsage(f"no such point: {', '.join(unknown)}; the run has {', '.join(labels)}")
    return [one for one in points if only is None or one.label in only]


def _decode_tp(setup: PDSetup) -> int:
    return setup.decode_tp if setup.num_decode else setup.prefill_tp


def _add_prefills(found: Profile, points: Sequence[Measured]) -> None:
    """One row a length; ``request_s`` from those that were measured alone and in a queue."""
    overheads_s = []
    by_length: dict[int, list[Measured]] = defaultdict(list)
    for one in points:
        if one.is_closed_loop:
            by_length[one.point.isl].append(one)
        else:
            found.warnings.append(
                f"{one.label}: sent at a rate, not one at a time or into a queue that is always "
                "full, so that its times tell no step of a prefill; it is left out"
            )
    if points and not by_length:
        raise InvalidUsage(f"{found.warnings[0]}; measure it without --request-rate")
    rows = []
    one_length = len(by_length) == 1
    for isl, group in by_length.items():
        alone_s = [_ttft_s(one) for one in group if not _is_queued(one)]
        queued_s = [_each_s(one) for one in group if _is_queued(one)]
        if queued_s and alone_s:
            overheads_s.append(max(0.0, min(alone_s) - float(np.median(queued_s))))
        rows.append((isl, float(np.median(queued_s or alone_s)), bool(queued_s), group[0]))
    found.request_s = min(overheads_s, default=0.0)
    for isl, step_s, was_queued, one in rows:
        budget = one.setup.token_budget or _TOKEN_BUDGET
        row = StepRow(
            step_s if was_queued else step_s - found.request_s,
            num_prompt_tokens=isl,
            num_pairs=0.0 if one_length else pairs_of(isl, 0),
            num_steps=math.ceil(isl / budget),
            longest_prompt_tokens=isl,
            setup=one.setup.name,
        )
        found.rows.append(row)


def _add_decodes(found: Profile, points: Sequence[Measured]) -> None:
    """A row for each number of requests that decode, of each point."""
    longest = max((one.point.isl + one.point.osl for one in points), default=0)
    joined: list[str] = []
    for row, gaps_s in _decode_rows(points, joined):
        found.rows.append(row)
        found.gaps.append((row, gaps_s))
        found.most_context = max(found.most_context, round(row.num_decoding * longest))
    if joined and not found.gaps:
        raise InvalidUsage(f"{joined[0]}; measure on an idle machine")
    found.warnings += joined
    setups = sorted({row.setup for row, _ in found.gaps})
    if len(setups) > 1:
        found.warnings.append(
            f"the decode steps are of {len(setups)} set-ups ({', '.join(setups)}), whose steps may "
            "differ; --points takes those of one"
        )


def _is_queued(one: Measured) -> bool:
    """Whether requests wait all the time; a single one never does, however many might."""
    return one.point.concurrency > 1 and len(one.replies) > 1


def _ttft_s(one: Measured) -> float:
    return float(np.median([reply.ttft_ms for reply in one.replies])) * 1e-3


def _each_s(one: Measured) -> float:
    """Seconds from one first token to the next, where a queue waits all the time."""
    ends_s = sorted(one.sent_s[reply.index] + reply.ttft_ms * 1e-3 for reply in one.replies)
    return float(ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)


def _decode_rows(
    points: Sequence[Measured], joined: list[str]
) -> Iterator[tuple[StepRow, list[float]]]:
    """Gaps by point and number of requests that decode; of a median gap, a row.

    A point whose messages came together has no gaps of steps: ``joined`` gets a text of it.
    """
    for one in points:
        if (share := _joined(one)) > MOST_JOINED:
            joined.append(
                f"{one.label}: {share:.0%} of the gaps are under {ONE_READ_MS} ms, messages that "
                "came together, so its decode steps are left out"
            )
            continue
        by_count: dict[int, list[float]] = defaultdict(list)
        begins_s, ends_s = _spans(one)
        engines = one.setup.num_decode or one.setup.num_prefill
        if engines != 1:
            continue  # which engine a request was on is not recorded
        for reply in one.replies:
            gaps_s = reply.gaps_ms * 1e-3
            at_s = one.sent_s[reply.index] + reply.ttft_ms * 1e-3 + np.cumsum(gaps_s) - gaps_s / 2
            counts = np.searchsorted(begins_s, at_s, "right") - np.searchsorted(ends_s, at_s)
            for count, gap_s in zip(counts[_SKIPPED_GAPS:], gaps_s[_SKIPPED_GAPS:], strict=True):
                by_count[int(count)].append(float(gap_s))
        for count, values_s in sorted(by_count.items()):
            median_s = float(np.median(values_s))
            plain = [value for value in values_s if value <= STALL_FACTOR * median_s]
            if len(plain) >= _LEAST_GAPS:
                held = count * (one.point.isl + one.point.osl / 2)
                yield (
                    StepRow(
                        median_s,
                        num_decoding=count,
                        num_context_tokens=held,
                        setup=one.setup.name,
                    ),
                    plain,
                )


def _joined(one: Measured) -> float:
    """Share of gaps that are none, 0 to 1."""
    gaps_s = [reply.gaps_ms[_SKIPPED_GAPS:] * 1e-3 for reply in one.replies]
    all_s = np.concatenate(gaps_s) if gaps_s else np.empty(0)
    return float(np.count_nonzero(all_s < _ONE_READ_S)) / max(1, len(all_s))


def _anchors(rows: Sequence[StepRow]) -> Iterator[StepRow]:
    """Rows for what those of one length alone leave open; see above."""
    decode = [row for row in rows if not row.num_prompt_tokens]
    if not decode:
        return
    batches = np.array([row.num_decoding for row in decode])
    steps_s = np.array([row.step_s for row in decode])
    idle_s = steps_s.min()
    if len({row.num_context_tokens / row.num_decoding for row in decode}) == 1:
        if len(set(batches)) > 1:
            idle_s = min(idle_s, max(idle_s / 2, float(np.polyfit(batches, steps_s, 1)[1])))
        most = float(batches.max())
        for batch in sorted({1.0, most}):
            yield StepRow(float(idle_s), num_decoding=batch, is_assumed=True)
    if len({row.num_prompt_tokens for row in rows if row.num_prompt_tokens}) == 1:
        yield StepRow(float(idle_s), num_prompt_tokens=1, is_assumed=True)


def _spans(one: Measured) -> tuple[Floats, Floats]:
    """When requests began and ended to decode, each ascending."""
    begins_s = [one.sent_s[reply.index] + reply.ttft_ms * 1e-3 for reply in one.replies]
    lengths_s = [float(reply.gaps_ms.sum()) * 1e-3 for reply in one.replies]
    ends_s = [begin_s + length_s for begin_s, length_s in zip(begins_s, lengths_s, strict=True)]
    return np.sort(begins_s), np.sort(ends_s)


def engine_of(
    points: Sequence[Measured], only: Collection[str] | None = None, *, source: str
) -> EngineModel:
    """The engine that was measured, with costs fitted to those points.

    Args:
        points, only: as of `profile_of`.
        source: for the reader.

    Raises:
        InvalidUsage: as `profile_of`, or too little was measured for a fit.
    """
    found = profile_of(points, only)
    setup = taken_of(points, only)[0].setup
    version = setup.environment.get("vllm", "")
    return EngineModel(
        name=f"vLLM {version}".rstrip(),
        model=setup.model.removeprefix("dummy:"),
        source=source,
        steps=[found.fit(setup.prefill_tp)],
        first_tokens_together=found.first_tokens_together,
    )
