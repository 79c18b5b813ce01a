"""Which machine a profile was measured on."""

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

_CPU_INFO = Path("/proc/cpuinfo")
_Text = Annotated[str, Meta(max_length=512)]


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What the choices of a profile depend on, all as text. Holds no host name and no path.

    Attributes:
        kvxfer: version.
        system: kernel, its release, and the architecture.
        cpu: the processor's name.
        cpus: how many the host has, whichever of them a process may use.
        gpus: names of all GPUs of the host, joined by commas; empty for none.
        driver: NVIDIA's; empty for none.
        cuda: what kvxfer was built with; empty for none.
        libraries: versions of the libraries of network transports, by transport.
    """

    kvxfer: _Text
    system: _Text
    cpu: _Text
    cpus: _Text
    gpus: _Text = ""
    driver: _Text = ""
    cuda: _Text = ""
    libraries: Annotated[Mapping[_Text, _Text], Meta(max_length=16)] = {}


def differences(profile: Fingerprint, here: Fingerprint) -> list[str]:
    """What differs of the host, each as the field and both values; libraries are not compared."""
    fields = (name for name in Fingerprint.__struct_fields__ if name != "libraries")
    pairs = ((name, getattr(profile, name), getattr(here, name)) for name in fields)
    return [difference(name, theirs, own) for name, theirs, own in pairs if theirs != own]


def difference(name: str, theirs: str, own: str) -> str:
    """One field that differs."""
    return f"{name} is {theirs or 'none'} in the profile and {own or 'none'} here"


def cpu_model() -> str:
    """The processor's name, or the architecture where /proc does not say."""
    try:
        text = _CPU_INFO.read_text(encoding="ascii", errors="replace")
    except OSError:
        return platform.machine()
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
