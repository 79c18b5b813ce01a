"""What the driver wrote to the kernel's log of GPUs and switches that failed."""

from kvxfer.diagnose.checks.base import (
    Absent,
    Answer,
    Check,
    answer,
    describe,
    fail,
    listed,
    no_gpus,
    warn,
)
from kvxfer.diagnose.facts import Facts, Xid
from kvxfer.diagnose.figures import Figures
from kvxfer.diagnose.result import Finding

# After a 145 that is called non-fatal collectives have been seen to hang (NVIDIA/nccl#2241).
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


def _kernel_log(facts: Facts, _: Figures) -> Answer:
    xids = facts.host.xids
    if xids is None:
        return Absent("the kernel's log is not readable; run as root for it")
    nobody_writes = facts.host.gpu_pcis == () or facts.host.driver == ""
    if not xids and not facts.gpus and nobody_writes:
        return no_gpus(facts)  # an empty log says nothing of GPUs that are not driven
    return answer(
        [_of_switch(xid) if xid.of_switch else _of_gpu(facts, xid) for xid in xids],
        "no Xid of the NVIDIA driver in the kernel's log",
    )


def _of_gpu(facts: Facts, xid: Xid) -> Finding:
    gpus = [gpu for gpu in facts.gpus or () if gpu.pci == xid.pci]
    remotes = {link.index: link.remote_pci for gpu in gpus for link in gpu.links or ()}
    where = describe(gpus[0]) if gpus else f"GPU at {xid.pci}"
    where += f", {xid.instance}" if xid.instance else ""
    where += _links_of(xid, remotes)
    evidence = f"Xid {xid.code} in the kernel's log: {xid.text}".rstrip(": ")
    if xid.code not in _FATAL or (xid.nonfatal and xid.code != _FATAL_ANYWAY):
        remedy = "look the code up in NVIDIA's Xid document; mind it if it comes again"
        return warn(where, evidence, cause="the driver reported an error", remedy=remedy)
    cause, remedy = _FATAL[xid.code]
    return fail(where, evidence, cause=cause, remedy=remedy)


def _of_switch(xid: Xid) -> Finding:
    return (warn if xid.nonfatal else fail)(
        f"NVSwitch at {xid.pci}{_links_of(xid, {})}",
        f"SXid {xid.code} in the kernel's log: {xid.text}",
        cause="a switch reported an error of a link or of itself",
        remedy="see the fabric manager's log; reset GPUs and switches if it comes again",
    )


def _links_of(xid: Xid, remotes: dict[int, str]) -> str:
    """The links that an error names, each with its other end where that is known."""
    names = [
        f"link {link}" + (f" to {remotes[link]}" if remotes.get(link) else "") for link in xid.links
    ]
    return f", {listed(names)}" if names else ""


CHECKS = (Check("kernel-log", "is the kernel's log free of GPU errors", _kernel_log),)
