"""Whether rates are what the hardware allows, and what the rest of the node reaches.

A figure with wrong bytes is judged for that alone.
"""

from collections.abc import Callable, Sequence

from kvxfer.diagnose import expected
from kvxfer.diagnose.checks.base import Absent, Answer, Check, answer, fail, no_gpus, warn
from kvxfer.diagnose.facts import Facts
from kvxfer.diagnose.figures import (
    BOTH_WAYS,
    CROWD_KINDS,
    ENGINE,
    KERNEL,
    LATENCY,
    PAGED,
    PINNED,
    Figure,
    Figures,
)
from kvxfer.diagnose.outliers import common_end, late_ones, slow_ones
from kvxfer.diagnose.result import Finding

_RATE_KINDS = (ENGINE, KERNEL, PAGED, BOTH_WAYS)
_OUTLIER_CAUSE = "its links or lanes are degraded, or something else uses them now"
_OUTLIER_REMEDY = "see its NVLinks, PCIe width and errors; measure again without other load"


def _right(figures: Figures, *kinds: str) -> list[Figure]:
    return [figure for figure in figures.of(*kinds) if figure.is_right]


def _not_measured(facts: Facts, figures: Figures, what: str) -> Absent:
    return no_gpus(facts) if not facts.gpus else Absent(figures.skipped.get(what, "not measured"))


def _pair_rate(facts: Facts, figures: Figures) -> Answer:
    measured = _right(figures, ENGINE)
    known = [figure for figure in measured if figure.fraction_of_limit is not None]
    if not known:
        return (
            Absent("the links' limits are not known") if measured else _absent_pairs(facts, figures)
        )
    findings = [found for figure in known if (found := _below_limit(facts, figure)) is not None]
    least = min(known, key=lambda figure: figure.fraction_of_limit or 0.0)
    return answer(findings, f"{least.fraction_of_limit:.0%} of {least.limit_source} at least")


def _absent_pairs(facts: Facts, figures: Figures) -> Absent:
    if facts.gpus and len(facts.gpus) < 2:
        return Absent("one GPU has no pairs")
    return _not_measured(facts, figures, "pairs of GPUs")


def _below_limit(facts: Facts, figure: Figure) -> Finding | None:
    pair = facts.pair(int(figure.src[3:]), int(figure.dst[3:]))
    by_nvlink = bool(pair.num_nvlinks)
    if not by_nvlink and pair.cuda_access is False:
        return None  # p2p-access says so; the limit is not of the path that was taken
    good, bad = (
        (expected.NVLINK_GOOD, expected.NVLINK_BAD)
        if by_nvlink
        else (expected.PEER_PCIE_GOOD, expected.PEER_PCIE_BAD)
    )
    cause = "the links carry less than they should" if by_nvlink else "the path through PCIe"
    return _judge(figure, good, bad, cause, _OUTLIER_REMEDY)


def _judge(figure: Figure, good: float, bad: float, cause: str, remedy: str) -> Finding | None:
    fraction = figure.fraction_of_limit
    if fraction is None or fraction >= good:
        return None
    evidence = (
        f"{figure.gb_per_s:.4g} GB/s, {fraction:.0%} of {figure.limit_gb_per_s:.4g} "
        f"({figure.limit_source}); {good:.0%} is expected"
    )
    finding = fail if fraction < bad else warn
    return finding(figure.where, evidence, cause=cause, remedy=remedy)


def _outlier(facts: Facts, figures: Figures) -> Answer:
    groups: dict[tuple[str, str], list[Figure]] = {}
    for figure in _right(figures, *_RATE_KINDS, *CROWD_KINDS):
        groups.setdefault((figure.kind, _path_of(facts, figure)), []).append(figure)
    groups = {key: group for key, group in groups.items() if len(group) > 1}
    if not groups:
        return _absent_pairs(facts, figures)
    findings = [found for group in groups.values() for found in _outliers_of(group)]
    return answer(findings, f"{sum(map(len, groups.values()))} rates agree with their like")


def _path_of(facts: Facts, figure: Figure) -> str:
    """Only figures over equal paths are compared."""
    if figure.kind in CROWD_KINDS:
        return ""
    return facts.pair(int(figure.src[3:]), int(figure.dst[3:])).path


def _outliers_of(group: Sequence[Figure]) -> list[Finding]:
    """One finding a slow pair; one for all of them where they share a device."""
    slow = slow_ones(group)
    shared = common_end([figure for figure, _ in slow], group)
    if shared:
        return [_shared_outlier(shared, slow)]
    return [
        _how_bad(figure, others)(
            figure.where,
            f"{figure.gb_per_s:.4g} GB/s, the others {others:.4g}",
            cause=_OUTLIER_CAUSE,
            remedy=_OUTLIER_REMEDY,
        )
        for figure, others in slow
    ]


def _shared_outlier(shared: str, slow: Sequence[tuple[Figure, float]]) -> Finding:
    rates = [figure.gb_per_s or 0.0 for figure, _ in slow]
    worst, others = min(slow, key=lambda one: one[0].gb_per_s or 0.0)
    return _how_bad(worst, others)(
        f"{shared}, {worst.kind}",
        f"{min(rates):.4g} to {max(rates):.4g} GB/s with {len(slow)} partners, the others "
        f"{others:.4g}",
        cause=f"all slow pairs share {shared}: {_OUTLIER_CAUSE}",
        remedy=_OUTLIER_REMEDY,
    )


def _how_bad(figure: Figure, others: float) -> Callable[..., Finding]:
    return fail if (figure.gb_per_s or 0.0) < expected.OUTLIER_BAD * others else warn


def _kernels(facts: Facts, figures: Figures) -> Answer:
    """Kernels against the copy engine over the same pair, in the same minute."""
    findings, count = [], 0
    for figure in _right(figures, KERNEL, PAGED):
        engine = figures.get(ENGINE, figure.src, figure.dst)
        if engine is None or not engine.gb_per_s or figure.gb_per_s is None:
            continue
        count += 1
        good = expected.KERNEL_GOOD if figure.kind == KERNEL else expected.PAGED_GOOD
        if figure.gb_per_s < good * engine.gb_per_s:
            findings.append(
                warn(
                    figure.where,
                    f"{figure.gb_per_s:.4g} GB/s, the copy engine {engine.gb_per_s:.4g}",
                    cause="SMs are busy or clocked down, or the path takes small packets badly",
                    remedy="measure again without load; see clocks; for PCIe let the reader copy",
                )
            )
    if not count:
        return _absent_pairs(facts, figures)
    return answer(findings, f"{count} kernel copies near the copy engine's rate")


def _both_ways(facts: Facts, figures: Figures) -> Answer:
    findings, count = [], 0
    for figure in _right(figures, BOTH_WAYS):
        there = figures.get(ENGINE, figure.src, figure.dst)
        back = figures.get(ENGINE, figure.dst, figure.src)
        if there is None or back is None or figure.gb_per_s is None:
            continue
        count += 1
        alone = (there.gb_per_s or 0.0) + (back.gb_per_s or 0.0)
        if figure.gb_per_s < expected.BOTH_WAYS_GOOD * alone:
            findings.append(
                warn(
                    figure.where,
                    f"{figure.gb_per_s:.4g} GB/s together, {alone:.4g} one after the other",
                    cause="the two directions share something: a host bridge, or memory",
                    remedy="see whether the path goes through the host; see ACS and IOMMU",
                )
            )
    if not count:
        return _absent_pairs(facts, figures)
    return answer(findings, f"{count} pairs reach both rates at once")


def _latency(facts: Facts, figures: Figures) -> Answer:
    known = _right(figures, LATENCY)
    groups: dict[str, list[Figure]] = {}
    for figure in known:
        groups.setdefault(_path_of(facts, figure), []).append(figure)
    if not known:
        return _absent_pairs(facts, figures)
    late = [found for group in groups.values() for found in late_ones(group)]
    nanoseconds = [figure.latency_ns or 0.0 for figure in known]
    return answer(
        [
            warn(
                figure.where,
                f"{figure.latency_ns:.0f} ns a read, the others {others:.0f} ns",
                cause="a longer path than the others', or packets that are repeated",
                remedy="see the errors of its NVLinks, and its place in the topology",
            )
            for figure, others in late
        ],
        f"{min(nanoseconds):.0f} to {max(nanoseconds):.0f} ns a read",
    )


def _crowds(facts: Facts, figures: Figures) -> Answer:
    measured = _right(figures, *CROWD_KINDS)
    known = [figure for figure in measured if figure.fraction_of_limit is not None]
    if not known:
        return (
            Absent("the links' limits are not known") if measured else _absent_pairs(facts, figures)
        )
    cause = "links, switches or a GPU's copy engines do not carry several copies at once"
    judged = [
        _judge(figure, expected.CROWD_GOOD, expected.CROWD_BAD, cause, _OUTLIER_REMEDY)
        for figure in known
    ]
    least = min(figure.fraction_of_limit or 0.0 for figure in known)
    return answer([one for one in judged if one], f"{least:.0%} of the shared links at least")


def _host_device(facts: Facts, figures: Figures) -> Answer:
    best = _best_pinned(_right(figures, PINNED))
    if not best:
        return _not_measured(facts, figures, "host and GPUs")
    cause = "fewer PCIe lanes or a lower generation than told, or slow host memory"
    remedy = "see pcie-width and pcie-speed; populate all memory channels of the socket"
    findings = [
        found
        for figure in best
        if (found := _judge(figure, expected.PCIE_GOOD, expected.PCIE_BAD, cause, remedy))
    ]
    for direction in (True, False):
        group = [figure for figure in best if figure.dst.startswith("gpu") == direction]
        findings += _outliers_of(group)
    rates = [figure.gb_per_s or 0.0 for figure in best]
    return answer(findings, f"{min(rates):.4g} to {max(rates):.4g} GB/s from the best NUMA node")


def _best_pinned(figures: Sequence[Figure]) -> list[Figure]:
    """Of each GPU and direction the figure of its best NUMA node."""
    best: dict[tuple[str, bool], Figure] = {}
    for figure in figures:
        to_gpu = figure.dst.startswith("gpu")
        key = (figure.dst if to_gpu else figure.src), to_gpu
        if key not in best or (figure.gb_per_s or 0.0) > (best[key].gb_per_s or 0.0):
            best[key] = figure
    return list(best.values())


CHECKS = (
    Check("pair-rate", "do pairs of GPUs reach what their links allow", _pair_rate),
    Check("outliers", "is every pair as fast as its like", _outlier),
    Check("kernels", "do kernels copy as fast as the copy engine", _kernels),
    Check("both-ways", "do both directions work at once", _both_ways),
    Check("latency", "is every pair as near as its like", _latency),
    Check("crowds", "do many copies at once use the links", _crowds),
    Check("host-device", "is host memory near enough to every GPU", _host_device),
)
