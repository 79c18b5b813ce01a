"""Errors of the NVIDIA driver in the kernel's log.

Xid codes and their meaning: NVIDIA's "Xid Errors" document; SXids: its Fabric Manager User Guide.
"""

import os
import re

from kvxfer.diagnose.facts import Xid, format_pci

_KMSG = "/dev/kmsg"
_RECORD_BYTES = 8192
_MAX_RECORDS = 100_000
_MAX_XIDS = 1_000  # devices times codes: the first of them tell
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d{1,6})(?:, *(.*))?")
# Of each event the driver writes a line with its severity in words; others hold registers.
_SXID = re.compile(r"SXid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d{1,6}), ((?:Non-)?[Ff]atal,.*)")


def read_kernel_log() -> str | None:
    """Lines of the log that NVIDIA's drivers wrote; None where it is not readable (no root)."""
    try:
        log = os.open(_KMSG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines = []
    try:
        for _ in range(_MAX_RECORDS):
            try:
                record = os.read(log, _RECORD_BYTES)
            except BrokenPipeError:  # overwritten meanwhile: go on with the oldest that is there
                continue
            except OSError:  # no more
                break
            if not record:
                break
            text = record.decode(errors="replace").partition(";")[2].split("\n")[0]
            if "NVRM" in text or "nvidia" in text:
                lines.append(text)
    finally:
        os.close(log)
    return "\n".join(lines) + "\n"


def parse_xids(text: str) -> tuple[Xid, ...]:
    """The Xids and SXids of a log, each code of a device once, with its first text.

    At most 1,000 of them.
    """
    found: dict[tuple[str, int], Xid] = {}
    for line in text.splitlines():
        of_switch = _SXID.search(line)
        match = of_switch or _XID.search(line)
        if match is None:
            continue
        pci, code, words = format_pci(match[1]), int(match[2]), (match[3] or "").strip()
        xid = Xid(code=code, pci=pci, text=words, of_switch=of_switch is not None)
        found.setdefault((pci, code), xid)
        if len(found) == _MAX_XIDS:
            break
    return tuple(found.values())
