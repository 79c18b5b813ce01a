"""Whether bytes were right, measurements ended, figures can be: before anything about speed."""

from kvxfer.diagnose.checks.base import Absent, Answer, Check, answer, fail, warn
from kvxfer.diagnose.expected import IMPOSSIBLE
from kvxfer.diagnose.facts import Facts
from kvxfer.diagnose.figures import HOST_KINDS, NIC_KINDS, PAIR_KINDS, Figure, Figures
from kvxfer.diagnose.result import Finding
from kvxfer.units import format_bytes


def _bytes(facts: Facts, figures: Figures) -> Answer:
    compared = [figure for figure in figures.all if figure.rounds]
    if not compared:
        return Absent(_why_nothing(figures))
    num_bytes = sum(figure.num_bytes * figure.rounds for figure in compared)
    return answer(
        [_wrong(facts, figure) for figure in compared if figure.num_wrong],
        f"{format_bytes(num_bytes)} compared by their destinations in {len(compared)} measurements",
    )


def _wrong(facts: Facts, figure: Figure) -> Finding:
    cause, remedy = "memory, a link or the driver corrupts data", "take the part out of service"
    if figure.kind in PAIR_KINDS:
        pair = facts.pair(int(figure.src[3:]), int(figure.dst[3:]))
        if facts.host.iommu == "translated":
            cause = "the IOMMU translates peer addresses wrongly, which some drivers do not notice"
            remedy = "boot with iommu=pt or iommu=off; until then do without peer access"
        elif facts.host.hypervisor:
            cause = (
                f"peer addresses are mapped wrongly in a virtual machine ({facts.host.hypervisor})"
            )
            remedy = "do without peer access until the hypervisor or the driver is updated"
        if pair.cuda_access:
            cause += "; CUDA says that the pair has peer access"
    return fail(
        figure.where,
        f"{figure.num_wrong} wrong words of 8 bytes; first: {figure.first_wrong}",
        cause=cause,
        remedy=remedy,
    )


def _measured(_: Facts, figures: Figures) -> Answer:
    if not figures.all:
        return Absent(_why_nothing(figures))
    return answer(
        [
            fail(
                figure.where,
                figure.error,
                cause="a device failed, or hung, under a copy that it says it can do",
                remedy="see the kernel's log for the device; reset it before it is used again",
            )
            for figure in figures.all
            if figure.error
        ],
        f"all {len(figures.all)} measurements ended",
    )


def _possible(_: Facts, figures: Figures) -> Answer:
    known = [
        (figure, figure.fraction_of_limit)
        for figure in figures.all
        # A NIC may turn its own packets round inside, past the port that is its limit.
        if figure.fraction_of_limit is not None and figure.kind not in (*HOST_KINDS, *NIC_KINDS)
    ]
    if not known:
        return Absent("no figure has a limit")
    return answer(
        [
            warn(
                figure.where,
                f"{figure.gb_per_s:.4g} GB/s is {fraction:.0%} of {figure.limit_source}",
                cause="links or rates that the driver tells wrongly, or a fault of this tool",
                remedy="trust neither the figure nor the limit; compare with kvxfer sweep",
            )
            for figure, fraction in known
            if fraction > IMPOSSIBLE
        ],
        f"no figure of {len(known)} is above its limit",
    )


def _why_nothing(figures: Figures) -> str:
    if len(reasons := set(figures.skipped.values())) == 1:
        return reasons.pop()
    parts = sorted(f"{what}: {reason}" for what, reason in figures.skipped.items())
    return "; ".join(parts) or "nothing was measured"


CHECKS = (
    Check("bytes", "was every byte right", _bytes),
    Check("measured", "did every measurement end", _measured),
    Check("possible", "is every figure below what the hardware allows", _possible),
)
