"""Whether GPUs may reach each other, and whether all who say so agree."""

from kvxfer.diagnose.checks.base import Absent, Answer, Check, answer, fail, no_gpus, warn
from kvxfer.diagnose.facts import Facts, GpuPair
from kvxfer.diagnose.figures import Figures
from kvxfer.diagnose.result import Finding

_THROUGH_HOST = "transfers go through host memory, at a fraction of the rate"


def _where(pair: GpuPair) -> str:
    return f"GPU {pair.src} -> GPU {pair.dst}"


def _p2p_nvlink(facts: Facts, _: Figures) -> Answer:
    linked = {gpu.index for gpu in facts.gpus or () if gpu.active_links}
    joined = [pair for pair in facts.pairs if pair.num_nvlinks]
    asked = joined + [pair for pair in facts.pairs if _is_ok_off_nvlink(pair, linked)]
    known = [pair for pair in asked if pair.nvlink is not None]
    if not known:
        return no_gpus(facts) if not facts.gpus else Absent("no pair with NVLink and a P2P status")
    findings = [found for pair in known if (found := _nvlink_fault(pair)) is not None]
    return answer(findings, f"ok on {len(known)} pairs{_untold(len(asked) - len(known))}")


def _is_ok_off_nvlink(pair: GpuPair, linked: set[int]) -> bool:
    """By the topology PCIe joins the two; their links are up, and P2P over NVLink is ok."""
    by_pcie = bool(pair.path) and not pair.num_nvlinks
    return by_pcie and pair.nvlink == "ok" and {pair.src, pair.dst} <= linked


def _nvlink_fault(pair: GpuPair) -> Finding | None:
    evidence = f"topology says {pair.path}, P2P status over NVLink is '{pair.nvlink}'"
    if not pair.num_nvlinks:
        return warn(
            _where(pair),
            f"{evidence}, and both have links up",
            cause="a contradiction: the topology is of another time, or misses the links",
            remedy="run nvidia-smi topo -m again; measure the pair, which shows what it takes",
        )
    if pair.nvlink == "ok":
        return None
    return fail(
        _where(pair),
        evidence,
        cause="a contradiction: degraded hardware, or a fabric that is not complete",
        remedy="see the fabric's state; reset the GPUs; suspect board, baseboard or switch",
    )


def _untold(count: int) -> str:
    return f"; of {count} more no status is told" if count else ""


def _p2p_access(facts: Facts, _: Figures) -> Answer:
    known = [
        pair
        for pair in facts.pairs
        if (pair.cuda_access, pair.read, pair.write) != (None, None, None)
    ]
    if not known:
        return no_gpus(facts) if not facts.gpus else Absent("one GPU, or no word on peer access")
    findings = [found for pair in known if (found := _access_fault(facts, pair)) is not None]
    untold = _untold(len(facts.pairs) - len(known))
    return answer(findings, f"every one of {len(known)} pairs{untold}")


def _access_fault(facts: Facts, pair: GpuPair) -> Finding | None:
    """Any refusal; and whether all who were asked refuse, or contradict each other."""
    told = {"read": pair.read, "write": pair.write}
    statuses = ", ".join(f"{name} {status}" for name, status in told.items() if status is not None)
    refused = any(status not in (None, "ok") for status in told.values())
    access = pair.cuda_access
    if (access and refused) or (access is False and statuses and not refused):
        word = "yes" if access else "no"
        return fail(
            _where(pair),
            f"CUDA says {word} to peer access, NVML says {statuses}",
            cause="a contradiction between the driver's two interfaces",
            remedy="trust neither: see the byte check; reset the GPUs or restart the driver",
        )
    if access is not False and not refused:
        return None
    if access is None and "ok" in (*told.values(), pair.nvlink):
        over_nvlink = ", over NVLink ok" if pair.nvlink == "ok" else ""
        return warn(
            _where(pair),
            f"peer access is allowed in part: {statuses}{over_nvlink}",
            cause="a contradiction: the driver allows one kind of access and refuses another",
            remedy="ask CUDA and compare bytes, as kvxfer diagnose does on the node; see NVreg_ "
            "options of the driver",
        )
    cause, remedy = _why_no_access(facts, pair)
    return warn(
        _where(pair),
        f"no peer access ({statuses or 'CUDA says no'}): {_THROUGH_HOST}",
        cause=cause,
        remedy=remedy,
    )


def _why_no_access(facts: Facts, pair: GpuPair) -> tuple[str, str]:
    if any(gpu.mig for gpu in facts.gpus or ()):
        return "MIG is on", "turn MIG off"
    if facts.host.hypervisor:
        return (
            f"a virtual machine ({facts.host.hypervisor}) in which GPUs are not peers",
            "give the machine GPUs of one board with peer access, or a whole baseboard",
        )
    if pair.path == "SYS":
        return (
            "the two are on different sockets without NVLink",
            "place the two ends of a transfer on GPUs of one socket",
        )
    return (
        "the chipset, the part or a driver option forbids it",
        "check nvidia-smi topo -p2p r, ACS, and NVreg_ options of the driver",
    )


CHECKS = (
    Check("p2p-nvlink", "does peer access agree with the NVLinks", _p2p_nvlink),
    Check("p2p-access", "can every GPU reach every other", _p2p_access),
)
