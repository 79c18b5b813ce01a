"""Errors of the NVIDIA driver in the kernel's log.

Xid codes and their meaning: NVIDIA's "Xid Errors" document; SXids: its Fabric Manager User Guide.
"""

import os
import re
from collections import defaultdict

from msgspec.structs import replace

from kvxfer.diagnose.facts import Xid, format_pci

_KMSG = "/dev/kmsg"
_RECORD_BYTES = 8192
_MAX_RECORDS = 100_000
_MAX_XIDS = 1_000  # devices times codes: the first of them tell
# A GPU that is cut by MIG is followed by its instance: "PCI:0000:1a:00 GPU-I:05 GPU-CI:00".
_DEVICE = r"\((?:PCI:)?([0-9A-Fa-f:.]+)([^)]{0,64})\)"
_XID = re.compile(rf"NVRM: Xid {_DEVICE}: (\d{{1,6}})(?:, *(.*))?")
# Of each event the driver writes a line with its severity in words; others hold registers.
_SXID = re.compile(rf"SXid {_DEVICE}: (\d{{1,6}}), ((?:Non-)?[Ff]atal,.*)")
_NONFATAL = re.compile(r"\bnon-?fatal\b", re.IGNORECASE)
_LINK = re.compile(r"\blink (\d{1,3})\b", re.IGNORECASE)


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
    """The Xids and SXids of a log, each code of a device once a severity, with all its links.

    At most 1,000 of them.
    """
    found: dict[tuple[str, str, int, bool], Xid] = {}
    links: defaultdict[tuple[str, str, int, bool], set[int]] = defaultdict(set)
    for line in text.splitlines():
        xid = _xid_of(line)
        if xid is None:
            continue
        key = (xid.pci, xid.instance, xid.code, xid.nonfatal)
        found.setdefault(key, xid)
        links[key].update(xid.links)
        if len(found) == _MAX_XIDS:
            break
    return tuple(replace(xid, links=tuple(sorted(links[key]))) for key, xid in found.items())


def _xid_of(line: str) -> Xid | None:
    of_switch = _SXID.search(line)
    match = of_switch or _XID.search(line)
    if match is None:
        return None
    pci, instance, code, words = match.groups()
    words = (words or "").strip()
    return Xid(
        code=int(code),
        pci=format_pci(pci),
        text=words,
        of_switch=of_switch is not None,
        instance=instance.strip(),
        nonfatal=_NONFATAL.search(words) is not None,
        links=tuple(int(link) for link in _LINK.findall(words)),
    )
