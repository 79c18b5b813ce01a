"""Whether the driver has all GPUs, and they are well."""

from kvxfer.diagnose.checks.base import (
    Absent,
    Answer,
    Check,
    Fine,
    answer,
    describe,
    fail,
    listed,
    no_gpus,
    warn,
)
from kvxfer.diagnose.checks.unlisted import is_set_apart, why_not_ours, without_gpus
from kvxfer.diagnose.facts import Facts, Gpu
from kvxfer.diagnose.figures import Figures
from kvxfer.diagnose.result import Finding

_NOT_READY = 802  # cudaErrorSystemNotReady
_MISMATCH = 803  # cudaErrorSystemDriverMismatch


def _cuda_start(facts: Facts, _: Figures) -> Answer:
    host = facts.host
    # These two say more of what is wrong than that NVML lists no GPU.
    if host.cuda_status in (_NOT_READY, _MISMATCH) and (facts.gpus or host.gpu_pcis):
        return [_refused(facts)]
    if findings := without_gpus(facts):
        return findings
    if host.cuda_status is None:
        return no_gpus(facts) if not facts.gpus else Absent("CUDA was not asked")
    if host.cuda_status == 0:
        return Fine(f"driver {host.driver or 'of unknown version'}")
    return [_refused(facts)] if facts.gpus or host.gpu_pcis else no_gpus(facts)


def _refused(facts: Facts) -> Finding:
    host = facts.host
    cause, remedy = "the driver refuses to start", "see the kernel's log"
    if host.cuda_status == _NOT_READY:
        cause = "the NVSwitch fabric is not set up: the fabric manager does not run or is not done"
        remedy = "start the fabric manager of the driver's version, and read its log"
    elif host.cuda_status == _MISMATCH:
        cause = "the driver's library and its kernel module are of different versions"
        remedy = "reload the module, or reboot after the update"
    evidence = f"CUDA does not start: error {host.cuda_status}, {host.cuda_reason or 'no reason'}"
    return fail("driver", evidence, cause=cause, remedy=remedy)


def _gpu_count(facts: Facts, _: Figures) -> Answer:
    on_bus = facts.host.gpu_pcis
    expected = facts.host.num_expected_gpus
    too_few = []
    if expected is not None and len(facts.gpus or ()) < expected:
        too_few = [_too_few(facts, expected)]
    if not facts.gpus:
        return too_few or no_gpus(facts)  # cuda-start says why, where some are on the bus
    if on_bus is None:
        return too_few or Absent("the PCI bus was not read")
    if facts.host.container:
        return too_few or Absent("a container may be given fewer GPUs than the host has")
    missing = sorted(set(on_bus) - {gpu.pci for gpu in facts.gpus})
    unlisted = [_unlisted(pci, facts.host.gpu_drivers.get(pci)) for pci in missing]
    return answer([*too_few, *unlisted], f"{len(on_bus)} GPUs on the bus, all known to the driver")


def _unlisted(pci: str, binding: str | None) -> Finding:
    bound = "" if binding is None else f"; bound to {binding or 'none'}"
    cause, remedy = why_not_ours(binding) or (
        "it failed to start or fell off the bus",
        "look for its address in the kernel's log; power-cycle the node",
    )
    return (warn if is_set_apart(binding) else fail)(
        f"GPU at {pci}",
        f"on the PCI bus, but the driver does not list it{bound}",
        cause=cause,
        remedy=remedy,
    )


def _too_few(facts: Facts, expected: int) -> Finding:
    on_bus = facts.host.gpu_pcis
    bus = "" if on_bus is None else f", {len(on_bus)} on the PCI bus"
    return fail(
        "node",
        f"{len(facts.gpus or ())} GPUs listed by the driver{bus}; {expected} expected",
        cause="GPUs left the bus or failed to start; in a container or job, fewer were given to it",
        remedy="look for NVRM and Xid in the kernel's log; power-cycle the node",
    )


def _mig(facts: Facts, _: Figures) -> Answer:
    known = [gpu for gpu in facts.gpus or () if gpu.mig is not None]
    if not known:
        return no_gpus(facts) if not facts.gpus else Absent("no GPU here can be cut")
    return answer(
        [
            warn(
                describe(gpu),
                "MIG is on",
                cause="instances of a cut GPU have no peer access and no NVLink",
                remedy="turn MIG off on GPUs that serve one model: nvidia-smi -i N -mig 0",
            )
            for gpu in known
            if gpu.mig
        ],
        f"off on {len(known)} GPUs",
    )


def _memory_rows(facts: Facts, _: Figures) -> Answer:
    known = [
        gpu
        for gpu in facts.gpus or ()
        if (gpu.row_remap_failed, gpu.row_remap_pending) != (None, None)
    ]
    if not known:
        return no_gpus(facts) if not facts.gpus else Absent("no GPU here remaps rows")
    findings = [found for gpu in known if (found := _bad_row(gpu)) is not None]
    return answer(findings, f"none failed and none pending on {len(known)} GPUs")


def _bad_row(gpu: Gpu) -> Finding | None:
    if gpu.row_remap_failed:
        return fail(
            describe(gpu),
            "a bad row of its memory could not be replaced",
            cause="its spare rows are used up",
            remedy="take the GPU out of service and replace it",
        )
    if gpu.row_remap_pending:
        return warn(
            describe(gpu),
            "a bad row of its memory waits to be replaced",
            cause="an ECC error; the driver keeps off the row until a reset replaces it",
            remedy="reset the GPU when nothing runs on it",
        )
    return None


def _clocks(facts: Facts, _: Figures) -> Answer:
    known = [gpu for gpu in facts.gpus or () if gpu.slowdown is not None]
    if not known:
        return no_gpus(facts) if not facts.gpus else Absent("no GPU says why its clocks are low")
    return answer(
        [
            warn(
                describe(gpu),
                f"clocks are held down: {gpu.slowdown}",
                cause="cooling or power supply",
                remedy="check fans, air flow and power supplies",
            )
            for gpu in known
            if gpu.slowdown
        ],
        f"not held down on GPUs {listed([str(gpu.index) for gpu in known], 8)}",
    )


CHECKS = (
    Check("cuda-start", "does CUDA start", _cuda_start),
    Check("gpu-count", "does the driver have every GPU", _gpu_count),
    Check("memory-rows", "could bad memory rows be replaced", _memory_rows),
    Check("mig", "are the GPUs whole", _mig),
    Check("clocks", "do heat or power hold the clocks down", _clocks),
)
