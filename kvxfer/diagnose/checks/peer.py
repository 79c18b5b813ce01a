"""Whether GPUs may reach each other, and whether all who say so agree."""

from kvxfer.diagnose.checks.base import Absent, Answer, Check, answer, fail, no_gpus, warn
from kvxfer.diagnose.facts import Facts, GpuPair
from kvxfer.diagnose.figures import Figures
from kvxfer.diagnose.result import Finding

_THROUGH_HOST = "transfers go through host memory, at a fraction of the rate"


def _where(pair: GpuPair) -> str:
    return f"GPU {pair.src} -> GPU {pair.dst}"


def _p2p_nvlink(facts: Facts, _: Figures) -> Answer:
    linked = [pair for pair in facts.pairs if pair.num_nvlinks]
    known = [pair for pair in linked if pair.nvlink is not None]
    if not known:
        return no_gpus(facts) if not facts.gpus else Absent("no pair with NVLink and a P2P status")
    return answer(
        [
            fail(
                _where(pair),
                f"topology says {pair.path}, P2P status over NVLink is '{pair.nvlink}'",
                cause="a contradiction: degraded hardware, or a fabric that is not complete",
                remedy="see the fabric's state; reset the GPUs; suspect board, baseboard or switch",
            )
            for pair in known
            if pair.nvlink != "ok"
        ],
        f"ok on {len(known)} pairs",
    )


def _p2p_access(facts: Facts, _: Figures) -> Answer:
    known = [pair for pair in facts.pairs if (pair.cuda_access, pair.read) != (None, None)]
    if not known:
        return no_gpus(facts) if not facts.gpus else Absent("one GPU, or no word on peer access")
    findings = [found for pair in known if (found := _access_fault(facts, pair)) is not None]
    return answer(findings, f"every one of {len(known)} pairs")


def _access_fault(facts: Facts, pair: GpuPair) -> Finding | None:
    says_ok = {status == "ok" for status in (pair.read, pair.write) if status is not None}
    access = pair.cuda_access
    if access is not None and says_ok == {not access}:
        word = "yes" if access else "no"
        return fail(
            _where(pair),
            f"CUDA says {word} to peer access, NVML says read {pair.read}, write {pair.write}",
            cause="a contradiction between the driver's two interfaces",
            remedy="trust neither: see the byte check; reset the GPUs or restart the driver",
        )
    if access is not False and says_ok != {False}:
        return None
    cause, remedy = _why_no_access(facts, pair)
    status = f"read {pair.read}, write {pair.write}" if pair.read else "CUDA says no"
    return warn(
        _where(pair), f"no peer access ({status}): {_THROUGH_HOST}", cause=cause, remedy=remedy
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
