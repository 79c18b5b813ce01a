"""Why the driver does not list a GPU, or none at all: such a node must not read as healthy."""

from collections.abc import Sequence

from kvxfer.diagnose.checks.base import fail, listed, warn
from kvxfer.diagnose.facts import Facts, Host
from kvxfer.diagnose.result import Finding

_OURS = "nvidia"
# Drivers that hold a device for a virtual machine.
_HOLDERS = ("vfio-pci", "nvgrace-gpu-vfio-pci", "pci-stub", "pciback")
_APART = (
    "set apart for virtual machines",
    "diagnose inside the virtual machine; to use it here unbind it from its driver",
)
_TAKEN = (
    "another driver took the GPU before NVIDIA's",
    "keep that driver from loading (modprobe.d), install NVIDIA's, and reboot",
)
_NOT_TAKEN = (
    "the driver is loaded and did not take the GPU: it failed to start, or the driver is too old",
    "look for NVRM in the kernel's log; bind it, update the driver, or power-cycle",
)


def is_set_apart(binding: str | None) -> bool:
    """Whether the driver that a GPU is bound to holds it for a virtual machine."""
    return binding in _HOLDERS


def why_not_ours(binding: str | None) -> tuple[str, str] | None:
    """Why the loaded driver does not list a GPU, and what to do, by the driver it is bound to.

    None: it is NVIDIA's, or not told, and says nothing.
    """
    if binding is None or binding == _OURS:
        return None
    if is_set_apart(binding):
        return _APART
    return _TAKEN if binding else _NOT_TAKEN


def without_gpus(facts: Facts) -> Sequence[Finding]:
    """What is wrong where GPUs are on the bus and NVML lists none; nothing where it was not asked.

    Without a driver it need not have been asked.
    """
    host = facts.host
    if facts.gpus:
        return []
    if host.gpu_pcis == () and host.driver and host.nvml_reason and not host.container:
        return [_gone(host)]
    if not host.gpu_pcis or not (host.driver == "" or host.nvml_reason):
        return []
    cause, remedy = _why(host)
    return [fail("driver", _evidence(host), cause=cause, remedy=remedy)]


def _gone(host: Host) -> Finding:
    """The driver's module is not loaded where there is nothing for it."""
    return warn(
        "driver",
        f"driver {host.driver} is loaded, and no GPU is on the PCI bus",
        cause="the GPUs fell off the bus or were taken away; else only NVSwitches are driven here",
        remedy="look for NVRM in the kernel's log; power-cycle the node if it should have GPUs",
    )


def _evidence(host: Host) -> str:
    gpus = host.gpu_pcis or ()
    text = f"{len(gpus)} GPUs on the PCI bus ({listed(gpus)})"
    if host.driver == "":
        return f"{text} and no NVIDIA driver{_others(host)}"
    loaded = f"; driver {host.driver} is loaded{_others(host)}" if host.driver else ""
    return f"{text} and none to use: {host.nvml_reason}{loaded}"


def _others(host: Host) -> str:
    """Drivers that have the GPUs in NVIDIA's place."""
    names = sorted(set(host.gpu_drivers.values()) - {_OURS})
    return f"; bound to {', '.join(name or 'none' for name in names)}" if names else ""


def _why(host: Host) -> tuple[str, str]:
    """Cause and remedy, the surest first."""
    bound = set(host.gpu_drivers.values())
    if bound and all(map(is_set_apart, bound)):
        return _APART
    if host.driver == "" and bound - {"", *_HOLDERS}:
        return _TAKEN
    if host.driver == "":
        return (
            "the driver is not loaded: not installed, or does not fit this kernel",
            "load it (modprobe nvidia); if that fails install it, or rebuild it for this kernel",
        )
    if bound and _OURS not in bound:
        return _NOT_TAKEN
    if host.container:
        return (
            "the container was started without the GPUs' devices or the driver's libraries",
            "start it with its GPUs: --gpus all, or nvidia.com/gpu in the pod's limits",
        )
    return (
        "the driver's libraries are missing or of another version, or /dev/nvidia* is closed",
        "run nvidia-smi, which names it; install the libraries of the driver's version",
    )
