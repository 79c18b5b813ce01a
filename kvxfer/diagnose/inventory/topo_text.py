"""``nvidia-smi topo``: the fallback where NVML cannot be asked, and for captures.

The output varies: columns may be glued together or separated by tabs, NICs are named or numbered
with a legend, columns come and go, pasted tables are cut, and colour codes may stand between. A
cell of a kind that is not known here becomes an empty path; a column of a name that is not known
keeps its place, so that the cells of those after it stay theirs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GLUED = re.compile(r"(?:GPU\d+|NIC\d+|mlx\d+_\d+)+")
_DEVICE = re.compile(r"GPU\d+|NIC\d+|mlx\d+_\d+")
_GPU = re.compile(r"GPU\d{1,4}")
_AFFINITY = "CPU Affinity"  # the first column after those of devices
_PATH = r"NV\d{1,3}|SYS|NODE|PHB|PXB|PIX"
_CELL = re.compile(rf"{_PATH}|X(?![A-Za-z])|N/A|[^\s]+?(?=\s|$|{_PATH})")
_LEGEND = re.compile(r"\s*(NIC\d+):\s*(\S+)")
_KNOWN = re.compile(_PATH)
_HEADER = re.compile(r"GPU\d{1,4}(?![\d:])")
_ROW = re.compile(rf"GPU\d{{1,4}}\s*(?:{_PATH}|N/A)|.*\sX(?:\s|$)")
_STATUS = {
    "OK": "ok",
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "NS": "not supported",
    "DR": "disabled by regkey",
}


@dataclass(slots=True)
class Topology:
    """What the matrix says.

    Attributes:
        gpus: indices of the GPUs that have a column; a table that was cut has fewer rows.
        paths: ``(device, device)`` -> path; devices are ``GPU0`` or a NIC's name.
        nics: names of NICs.
        numa: ``GPU0`` -> its NUMA node; None = unknown, which ``N/A`` is.
    """

    gpus: list[int] = field(default_factory=list)
    paths: dict[tuple[str, str], str] = field(default_factory=dict)
    nics: list[str] = field(default_factory=list)
    numa: dict[str, int | None] = field(default_factory=dict)

    @property
    def num_gpus(self) -> int:
        """GPUs that have a column."""
        return len(self.gpus)

    def path(self, one: str, other: str) -> str:
        """Between two devices, which is the same in either direction; empty = unknown."""
        return self.paths.get((one, other)) or self.paths.get((other, one), "")


def parse_topo(text: str) -> Topology:
    """The matrix of ``nvidia-smi topo -m``, the first of several; empty where the tool failed."""
    lines = [_ANSI.sub("", line).strip() for line in text.splitlines()]
    start = next((index for index, line in enumerate(lines) if _is_header(line)), len(lines))
    columns = _columns_of(lines[start]) if start < len(lines) else []
    matches = [match for line in lines if (match := _LEGEND.fullmatch(line))]
    legend = {match[1]: match[2] for match in matches}
    topology = Topology()
    seen: set[str] = set()
    for line in lines[start + 1 :]:
        label = _label_of(line, columns)
        if label in seen:
            break
        if label:
            seen.add(label)
            _add_row(topology, label, columns, _CELL.findall(line[len(label) :]), legend)
    gpus = [name for name in dict.fromkeys(columns) if _GPU.fullmatch(name)]
    topology.nics = [legend.get(name, name) for name in columns if name not in gpus]
    topology.gpus = [int(name.removeprefix("GPU")) for name in gpus]
    return topology


def _is_header(line: str) -> bool:
    return _HEADER.match(line) is not None and _ROW.match(line) is None


def _columns_of(header: str) -> list[str]:
    """Names of devices, those that are glued together apart."""
    columns: list[str] = []
    for word in header.partition(_AFFINITY)[0].split():
        columns += _DEVICE.findall(word) if _GLUED.fullmatch(word) else [word]
    return columns


def _label_of(line: str, columns: Sequence[str]) -> str:
    """The device whose row a line is; empty = none, as a line of the legend is."""
    label = max((name for name in columns if line.startswith(name)), key=len, default="")
    return "" if line[len(label) :].startswith(":") else label


def _add_row(
    topology: Topology, label: str, columns: list[str], cells: list[str], legend: dict[str, str]
) -> None:
    name = legend.get(label, label)
    for column, cell in zip(columns, cells, strict=False):
        other = legend.get(column, column)
        if other != name:
            topology.paths[name, other] = cell if _KNOWN.fullmatch(cell) else ""
    if name.startswith("GPU"):
        # After the devices come CPU affinity, NUMA affinity and, in newer drivers, a GPU NUMA id.
        after = cells[len(columns) :]
        numa = after[1] if len(after) > 1 else ""
        topology.numa[name] = int(numa) if re.fullmatch(r"\d{1,4}", numa) else None


def parse_p2p(text: str) -> dict[tuple[int, int], str]:
    """The matrix of ``nvidia-smi topo -p2p``: ``(src, dst)`` -> ``ok`` or why not, where told."""
    lines = [_ANSI.sub("", line) for line in text.splitlines()]
    found: dict[tuple[int, int], str] = {}
    columns: list[str] = []
    for line in lines:
        words = line.split()
        if not columns:
            columns = [word for word in words if _GPU.fullmatch(word)]
        elif words and words[0] in columns:
            for column, word in zip(columns, words[1:], strict=False):
                if word in _STATUS:
                    found[int(words[0][3:]), int(column[3:])] = _STATUS[word]
    return found
