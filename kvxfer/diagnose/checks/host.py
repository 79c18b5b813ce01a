"""Copies between processes on CPUs, and through NICs."""

from kvxfer.diagnose import expected
from kvxfer.diagnose.checks.base import Absent, Answer, Check, answer, fail, warn
from kvxfer.diagnose.facts import Facts
from kvxfer.diagnose.figures import (
    HOST_KINDS,
    NIC_GPU,
    NIC_HOST,
    NIC_KINDS,
    Figure,
    Figures,
)
from kvxfer.diagnose.result import Finding


def _memcpy(_: Facts, figures: Figures) -> Answer:
    measured = [figure for figure in figures.of(*HOST_KINDS) if figure.is_right]
    known = [figure for figure in measured if figure.fraction_of_limit is not None]
    if not known:
        return Absent(figures.skipped.get("host", "not measured"))
    findings = [found for figure in known if (found := _slow_memcpy(figure)) is not None]
    rates = [figure.gb_per_s or 0.0 for figure in known]
    return answer(findings, f"{min(rates):.3g} to {max(rates):.3g} GB/s between processes")


def _slow_memcpy(figure: Figure) -> Finding | None:
    """By the fastest round: CPUs that others use now and then are no fault."""
    good = expected.memcpy_good(figure.kind)
    best = figure.best_gb_per_s or figure.gb_per_s or 0.0
    fraction = best / (figure.limit_gb_per_s or best)
    if fraction >= good:
        return None
    return warn(
        figure.where,
        f"{best:.3g} GB/s at best, {fraction:.0%} of {figure.limit_gb_per_s:.3g} "
        f"({figure.limit_source}); {good:.0%} is expected",
        cause="CPUs that other programs use, slow page faults, or a narrow path between sockets",
        remedy="measure again on idle CPUs; pin both processes to one NUMA node",
    )


def _nic_rate(facts: Facts, figures: Figures) -> Answer:
    measured = [figure for figure in figures.of(*NIC_KINDS) if figure.is_right]
    if not measured:
        return Absent(figures.skipped.get("NICs", "not measured"))
    findings = [found for figure in measured if (found := _slow_nic(figure)) is not None]
    for figure in measured:
        host = figures.get(NIC_HOST, figure.src, figure.dst)
        if figure.kind == NIC_GPU and host is not None and host.is_right:
            findings += _gpu_behind_host(facts, figure, host)
    return answer(findings, f"{len(measured)} loopbacks near the ports' rate")


def _slow_nic(figure: Figure) -> Finding | None:
    """By the fastest round, as copies between processes are."""
    if figure.kind != NIC_HOST or not figure.limit_gb_per_s:
        return None
    best = figure.best_gb_per_s or figure.gb_per_s or 0.0
    fraction = best / figure.limit_gb_per_s
    if fraction >= expected.NIC_GOOD:
        return None
    # Of a loopback that was measured here, which no NIC has been seen to pass or fail: a warning.
    is_bad = fraction < expected.NIC_BAD and not figure.rounds
    finding = fail if is_bad else warn
    return finding(
        figure.where,
        f"{best:.4g} GB/s, {fraction:.0%} of {figure.limit_gb_per_s:.4g}",
        cause="fewer PCIe lanes than the port needs, or memory on the far socket",
        remedy="see the NIC's PCIe width; run on CPUs of its NUMA node",
    )


def _gpu_behind_host(facts: Facts, figure: Figure, host: Figure) -> list[Finding]:
    """The NIC is well and the GPU's path to it is not: suspects in the order of likelihood."""
    if (figure.gb_per_s or 0.0) >= expected.NIC_GPU_GOOD * (host.gb_per_s or 0.0):
        return []
    ports, nic = facts.host.acs_ports, [one for one in facts.nics if one.name == figure.src]
    suspects = [
        "ACS: unknown without root" if ports is None else f"ACS: on at {len(ports)} ports",
        f"IOMMU: {facts.host.iommu or 'unknown'}",
        f"path: {'/'.join(sorted(set(nic[0].paths.values()))) if nic else 'unknown'}",
    ]
    return [
        warn(
            figure.where,
            f"{figure.gb_per_s:.4g} GB/s with GPU memory, {host.gb_per_s:.4g} with host memory",
            cause=f"the GPU's path to the NIC; {'; '.join(suspects)}",
            remedy="turn ACS off, boot with iommu=pt, use the GPU and NIC of one switch",
        )
    ]


CHECKS = (
    Check("memcpy", "do processes share memory at the CPU's rate", _memcpy),
    Check("nic-rate", "do NICs reach their ports' rate", _nic_rate),
)
