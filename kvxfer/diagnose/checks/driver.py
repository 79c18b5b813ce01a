"""Whether the driver has all GPUs, and they are well."""

import re
from itertools import pairwise

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
from kvxfer.diagnose.checks.unlisted import without_gpus
from kvxfer.diagnose.facts import Facts, Xid
from kvxfer.diagnose.figures import Figures
from kvxfer.diagnose.result import Finding

_NOT_READY = 802  # cudaErrorSystemNotReady
_MISMATCH = 803  # cudaErrorSystemDriverMismatch
# NVLink errors (144 to 150) and those of switches say which of the two they are. After a 145
# collectives have been seen to hang even so (NVIDIA/nccl#2241).
_NONFATAL = re.compile(r"\bnon-?fatal\b", re.IGNORECASE)
_FATAL_ANYWAY = 145
# NVIDIA, "Xid Errors": what ends transfers, what it says, what to do.
_FATAL = {
    48: ("a double-bit ECC error", "reset the GPU; run field diagnostics if it comes again"),
    63: ("a memory row was remapped", "reset the GPU, which completes the remapping"),
    64: ("a memory row could not be remapped", "replace the GPU"),
    74: ("an NVLink error", "check the link's other end and its cabling; reset GPUs and switches"),
    79: ("the GPU has fallen off the bus", "power-cycle the node; reseat or replace the GPU"),
    94: ("a contained ECC error", "restart the program; reset the GPU if it comes again"),
    95: ("an uncontained ECC error", "drain the node and reset the GPU"),
    119: ("the GPU's system processor does not answer", "reset the GPU; update the driver"),
    120: ("the GPU's system processor failed", "reset the GPU; update the driver"),
    121: ("a chip-to-chip link error", "reset the GPU; run field diagnostics"),
    144: ("an NVLink error", "drain the node; reset GPUs and switches"),
    145: ("an NVLink error of its remote end", "reboot the node; collectives hang until then"),
    146: ("an NVLink error", "drain the node; reset GPUs and switches"),
    147: ("an NVLink error", "drain the node; reset GPUs and switches"),
    148: ("an NVLink error", "drain the node; reset GPUs and switches"),
    149: ("an NVLink error", "drain the node; reset GPUs and switches"),
    150: ("an NVLink error", "drain the node; reset GPUs and switches"),
}


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
    if expected is not None and len(facts.gpus or ()) < expected:
        return [_too_few(facts, expected)]
    if not facts.gpus:
        return no_gpus(facts)  # cuda-start says why, where some are on the bus
    if on_bus is None:
        return Absent("the PCI bus was not read")
    if facts.host.container:
        return Absent("a container may be given fewer GPUs than the host has")
    missing = sorted(set(on_bus) - {gpu.pci for gpu in facts.gpus})
    if not missing:
        return Fine(f"{len(on_bus)} GPUs on the bus, all known to the driver")
    return [
        fail(
            f"GPU at {pci}",
            "on the PCI bus, but the driver does not list it",
            cause="it failed to start or fell off the bus",
            remedy="look for its address in the kernel's log; power-cycle the node",
        )
        for pci in missing
    ]


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


def _kernel_log(facts: Facts, _: Figures) -> Answer:
    xids = facts.host.xids
    if xids is None:
        return Absent("the kernel's log is not readable; run as root for it")
    nobody_writes = facts.host.gpu_pcis == () or facts.host.driver == ""
    if not xids and not facts.gpus and nobody_writes:
        return no_gpus(facts)  # an empty log says nothing of GPUs that are not driven
    return answer(
        [_of_xid(facts, xid) for xid in xids], "no Xid of the NVIDIA driver in the kernel's log"
    )


def _of_xid(facts: Facts, xid: Xid) -> Finding:
    gpus = [gpu for gpu in facts.gpus or () if gpu.pci == xid.pci]
    where = describe(gpus[0]) if gpus else f"GPU at {xid.pci}"
    where += _remote_of(facts, xid)
    evidence = f"Xid {xid.code} in the kernel's log: {xid.text}".rstrip(": ")
    nonfatal = _NONFATAL.search(xid.text) is not None and xid.code != _FATAL_ANYWAY
    if xid.of_switch:
        return _of_switch(xid, nonfatal)
    if xid.code not in _FATAL or nonfatal:
        remedy = "look the code up in NVIDIA's Xid document; mind it if it comes again"
        return warn(where, evidence, cause="the driver reported an error", remedy=remedy)
    cause, remedy = _FATAL[xid.code]
    return fail(where, evidence, cause=cause, remedy=remedy)


def _of_switch(xid: Xid, nonfatal: bool) -> Finding:
    return (warn if nonfatal else fail)(
        f"NVSwitch at {xid.pci}",
        f"SXid {xid.code} in the kernel's log: {xid.text}",
        cause="a switch reported an error of a link or of itself",
        remedy="see the fabric manager's log; reset GPUs and switches if it comes again",
    )


def _remote_of(facts: Facts, xid: Xid) -> str:
    """The other end of the link that an Xid names, where it names one."""
    words = xid.text.lower().replace(",", " ").replace("(", " ").split()
    numbers = [
        int(after) for word, after in pairwise(words) if word == "link" and after.isdecimal()
    ]
    for gpu in facts.gpus or ():
        for link in gpu.links or ():
            if gpu.pci == xid.pci and link.index in numbers and link.remote_pci:
                return f", link {link.index} to {link.remote_pci}"
    return f", link {numbers[0]}" if numbers else ""


def _memory_rows(facts: Facts, _: Figures) -> Answer:
    known = [gpu for gpu in facts.gpus or () if gpu.row_remap_failed is not None]
    if not known:
        return no_gpus(facts) if not facts.gpus else Absent("no GPU here remaps rows")
    return answer(
        [
            fail(
                describe(gpu),
                "a bad row of its memory could not be replaced",
                cause="its spare rows are used up",
                remedy="take the GPU out of service and replace it",
            )
            for gpu in known
            if gpu.row_remap_failed
        ],
        f"no failed replacement on {len(known)} GPUs",
    )


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
    Check("kernel-log", "is the kernel's log free of GPU errors", _kernel_log),
    Check("memory-rows", "could bad memory rows be replaced", _memory_rows),
    Check("mig", "are the GPUs whole", _mig),
    Check("clocks", "do heat or power hold the clocks down", _clocks),
)
