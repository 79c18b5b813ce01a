"""What ``ib_write_bw`` and its sisters of perftest print: rates of a NIC, and refused memory."""

import errno
import os
import re
from collections.abc import Mapping

from kvxfer.diagnose.figures import NIC_GPU, NIC_HOST, Figure

_NAME = re.compile(r"perftest-(.+)-(host|gpu)\.txt")
_HEADER = re.compile(r"#bytes\s+#iterations\s+BW peak\[(\w+)/sec\]")
_NUMBER = r"\d{1,9}(?:\.\d{1,9})?"
_ROW = re.compile(rf"\s*(\d{{1,12}})\s+\d+\s+{_NUMBER}\s+({_NUMBER})(?:\s+{_NUMBER})?\s*")
# perftest's MB are 2**20 bytes; with --report_gbits it prints 1e9 bits.
_TO_GB_PER_S = {"MB": (1 << 20) / 1e9, "MiB": (1 << 20) / 1e9, "Gb": 1 / 8}
_REFUSED = re.compile(r"(?:couldn't allocate|failed to create|can't create) mr", re.IGNORECASE)
_CODE = re.compile(r"(?:errno|error)\D{0,6}(\d{1,3})\b", re.IGNORECASE)
_MESSAGES = {
    os.strerror(code).lower(): code
    for code in (errno.EFAULT, errno.EPROTONOSUPPORT, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOMEM)
}


def nic_figures(texts: Mapping[str, str]) -> list[Figure]:
    """The rate of each NIC that was measured: of the largest message."""
    found = []
    for name, text in sorted(texts.items()):
        match = _NAME.fullmatch(name)
        rate = None if match is None else _rate(text)
        if match is not None and rate is not None:
            kind = NIC_HOST if match[2] == "host" else NIC_GPU
            found.append(Figure(kind=kind, src=match[1], dst=match[1], gb_per_s=rate))
    return found


def refused_errno(texts: Mapping[str, str]) -> int | None:
    """The errno with which GPU memory was refused; 0 where it was told without one; else None."""
    for name, text in sorted(texts.items()):
        match = _NAME.fullmatch(name)
        if match is None or match[2] != "gpu" or not _REFUSED.search(text):
            continue
        if code := _CODE.search(text):
            return int(code[1])
        lower = text.lower()
        return next((code for message, code in _MESSAGES.items() if message in lower), 0)
    return None


def _rate(text: str) -> float | None:
    header = _HEADER.search(text)
    if header is None or header[1] not in _TO_GB_PER_S:
        return None
    rows = [match for line in text.splitlines() if (match := _ROW.fullmatch(line))]
    if not rows:
        return None
    largest = max(rows, key=lambda row: int(row[1]))
    return float(largest[2]) * _TO_GB_PER_S[header[1]]
