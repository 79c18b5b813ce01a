"""A run's folder, read and analysed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from kvxfer.errors import InvalidUsage
from kvxfer.pd.analysis.compare import contests, crossings
from kvxfer.pd.analysis.faults import faults_of
from kvxfer.pd.analysis.handover import baseline_ttft_ms, handover_of
from kvxfer.pd.analysis.replies import Replies, replies_of
from kvxfer.pd.analysis.slo import Objective, judge
from kvxfer.pd.analysis.stalls import stalls_of
from kvxfer.pd.result import (
    PDPoint,
    PDSetup,
    bench_path,
    find_points,
    find_setups,
    load_point,
    load_setup,
)
from kvxfer.pd.summary import (
    Distribution,
    Finding,
    Load,
    PointSummary,
    RunSummary,
    SetupSummary,
)
from kvxfer.pd.vllm_json import BenchResult, load_bench


def analyse(
    folder: Path, *, objectives: Sequence[Objective] = (), token_budget: int | None = None
) -> RunSummary:
    """Read every set-up and point of a run and work its figures out.

    A record that cannot be read is a serious finding, and the others are analysed; so is a point
    that was cut off, which is no failure.

    Args:
        folder: what ``kvxfer pd bench --out`` wrote.
        objectives: what makes a request good; without any, no goodput.
        token_budget: most tokens of one engine step, for set-ups whose record does not say.

    Raises:
        InvalidUsage: there is no set-up, or not one point that can be read.
    """
    read = [_read(path, tuple(objectives), token_budget) for path in find_setups(folder)]
    alone = [summary for summary, _ in read if summary.setup.kind == "prefill_only"]
    setups = [_with_handovers(summary, replies, alone) for summary, replies in read]
    if not any(one.points for one in setups):
        texts = [finding.text for one in setups for finding in one.findings]
        raise InvalidUsage(f"{folder} has no whole point: {'; '.join(texts) or 'none was written'}")
    run = RunSummary(setups=setups, objectives=[str(one) for one in objectives])
    return replace(run, contests=contests(run), crossings=crossings(run))


def _read(
    folder: Path, objectives: tuple[Objective, ...], token_budget: int | None
) -> tuple[SetupSummary, list[Replies]]:
    """A set-up, and the replies of each of its points."""
    setup = load_setup(folder)
    if setup.token_budget is None:
        setup = msgspec.structs.replace(setup, token_budget=token_budget)
    whole, cut_off = find_points(folder)
    findings = [Finding(f"{path.name} was cut off: not used", False) for path in cut_off]
    pairs = []
    for path in whole:
        try:
            point = load_point(path)
            result = load_bench(bench_path(folder, point))
        except InvalidUsage as error:
            findings.append(Finding(str(error), True))
        else:
            pairs.append(_summarise(setup, point, result, objectives))
    pairs.sort(key=lambda pair: (-pair[0].load.isl, -pair[0].load.osl, pair[0].concurrency))
    points = [summary for summary, _ in pairs]
    return SetupSummary(setup, points, findings), [replies for _, replies in pairs]


def _with_handovers(
    summary: SetupSummary, replies: list[Replies], alone: list[SetupSummary]
) -> SetupSummary:
    """The same with what the hand-over took, where the set-up has one and a baseline is known."""
    if summary.setup.kind != "pd":
        return summary
    points = []
    for point, answers in zip(summary.points, replies, strict=True):
        alone_ms = baseline_ttft_ms(alone, point.load.isl, summary)
        handover = None if alone_ms is None else handover_of(answers, point, alone_ms)
        points.append(replace(point, handover=handover))
    return replace(summary, points=points)


def _summarise(
    setup: PDSetup, point: PDPoint, result: BenchResult, objectives: tuple[Objective, ...]
) -> tuple[PointSummary, Replies]:
    replies = replies_of(result)
    itl = Distribution.of(replies.gaps_ms())
    tpot_ms = [one.tpot_ms for one in replies.completed if one.tpot_ms is not None]
    goodput = judge(replies, objectives, result.duration) if objectives else None
    summary = PointSummary(
        load=Load.of(point),
        concurrency=point.concurrency,
        num_sent=result.num_requests,
        num_failed=len(replies.failed),
        duration_s=result.duration,
        requests_per_s=len(replies.completed) / result.duration,
        output_tokens_per_s=sum(one.num_tokens for one in replies.completed) / result.duration,
        ttft=Distribution.of(np.array([one.ttft_ms for one in replies.completed])),
        first_gap=Distribution.of(replies.first_gaps_ms()),
        later_gaps=Distribution.of(replies.later_gaps_ms()),
        itl=itl,
        tpot=Distribution.of(np.array(tpot_ms)),
        e2el=Distribution.of(np.array([one.e2el_ms for one in replies.completed])),
        stalls=stalls_of(setup, point, itl),
        goodput=goodput,
        findings=faults_of(point, result, replies),
    )
    return summary, replies
