"""Access Control Services of PCI bridges: what sends traffic between peers up to the root.

From the configuration space (PCI Express Base Specification, "Access Control Services": extended
capability 0x000D, its control register 6 bytes in), which only root may read beyond 256 bytes; or
from what ``lspci -vvv`` prints.
"""

import re
import struct
from pathlib import Path

from kvxfer.diagnose.facts import format_pci

_DEVICES = Path("/sys/bus/pci/devices")
_BRIDGE_CLASS = "0x0604"
_EXTENDED_START, _EXTENDED_END = 0x100, 0x1000
_ACS_CAPABILITY = 0x000D
_CONTROL_OFFSET = 6
_HEADER = re.compile(r"((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (.*)")


def read_acs(devices: Path = _DEVICES) -> dict[str, int] | None:
    """Bridge -> ACS control register, of bridges that have one; None without root."""
    found: dict[str, int] = {}
    for device in sorted(devices.iterdir()) if devices.is_dir() else ():
        try:
            if not (device / "class").read_text(encoding="ascii").startswith(_BRIDGE_CLASS):
                continue
            config = (device / "config").read_bytes()
        except OSError:
            continue
        if len(config) <= _EXTENDED_START:
            return None
        control = acs_control(config)
        if control is not None:
            found[device.name] = control
    return found


def acs_control(config: bytes) -> int | None:
    """The ACS control register in a configuration space; None where there is no such capability."""
    offset, seen = _EXTENDED_START, set[int]()
    while _EXTENDED_START <= offset <= min(len(config), _EXTENDED_END) - 8 and offset not in seen:
        seen.add(offset)
        (header,) = struct.unpack_from("<I", config, offset)
        if header & 0xFFFF == _ACS_CAPABILITY:
            (control,) = struct.unpack_from("<H", config, offset + _CONTROL_OFFSET)
            return int(control)
        offset = header >> 20
    return None


def parse_lspci(text: str) -> tuple[str, ...] | None:
    """Ports with any ACS flag on; None where lspci ran without root, or printed no such flags."""
    ports: list[str] = []
    device, seen = "", False
    for line in text.splitlines():
        if match := _HEADER.match(line):
            device = format_pci(match[1])
        elif "ACSCtl:" in line:
            seen = True
            if "+" in line:
                ports.append(device)
    if not seen and "access denied" in text:
        return None
    return tuple(ports) if seen or "Capabilities:" in text else None
