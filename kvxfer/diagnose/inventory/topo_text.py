"""``nvidia-smi topo``: the fallback where NVML cannot be asked, and for captures.

The output varies: columns may be glued together or separated by tabs, NICs are named or numbered
with a legend, columns come and go, and colour codes may stand between. A cell of a kind that is not
known here becomes an empty path.
"""

import re
from dataclasses import dataclass, field

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_DEVICE = re.compile(
    r"GPU\d+|NIC\d+|mlx\d+_(?:bond_?)?\d+|(?:bnxt_re|irdma|erdma_|efa_|rdmap)\w*\d+"
)
_PATH = r"NV\d+|SYS|NODE|PHB|PXB|PIX"
_CELL = re.compile(rf"{_PATH}|X(?![A-Za-z])|N/A|[^\s]+?(?=\s|$|{_PATH})")
_LEGEND = re.compile(r"\s*(NIC\d+):\s*(\S+)")
_KNOWN = re.compile(_PATH)
_STATUS = {
    "OK": "ok",
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "NS": "not supported",
    "DR": "disabled by regkey",
    "U": "unknown",
}


@dataclass(slots=True)
class Topology:
    """What the matrix says.

    Attributes:
        num_gpus: rows of GPUs.
        paths: ``(device, device)`` -> path; devices are ``GPU0`` or a NIC's name.
        nics: names of NICs.
        numa: ``GPU0`` -> its NUMA node; None = unknown, which ``N/A`` is.
    """

    num_gpus: int = 0
    paths: dict[tuple[str, str], str] = field(default_factory=dict)
    nics: list[str] = field(default_factory=list)
    numa: dict[str, int | None] = field(default_factory=dict)


def parse_topo(text: str) -> Topology:
    """The matrix of ``nvidia-smi topo -m``; an empty one where the tool failed."""
    lines = [_ANSI.sub("", line) for line in text.splitlines()]
    header = next((line for line in lines if "GPU0" in line), "")
    columns = _DEVICE.findall(header)
    matches = [match for line in lines if (match := _LEGEND.fullmatch(line.rstrip()))]
    legend = {match[1]: match[2] for match in matches}
    topology = Topology()
    for line in lines[lines.index(header) + 1 :] if header else ():
        label = _DEVICE.match(line.strip())
        if label is None or line.strip()[label.end() : label.end() + 1] == ":":
            continue
        cells = _CELL.findall(line.strip()[label.end() :])
        _add_row(topology, label[0], columns, cells, legend)
    topology.nics = [legend.get(name, name) for name in columns if not name.startswith("GPU")]
    topology.num_gpus = len(topology.numa)
    return topology


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
        topology.numa[name] = int(numa) if numa.isdecimal() else None


def parse_p2p(text: str) -> dict[tuple[int, int], str]:
    """The matrix of ``nvidia-smi topo -p2p``: ``(src, dst)`` -> ``ok`` or why not."""
    lines = [_ANSI.sub("", line) for line in text.splitlines()]
    found: dict[tuple[int, int], str] = {}
    columns: list[str] = []
    for line in lines:
        words = line.split()
        if not columns:
            columns = [word for word in words if re.fullmatch(r"GPU\d+", word)]
        elif words and words[0] in columns:
            for column, word in zip(columns, words[1:], strict=False):
                if word != "X":
                    pair = int(words[0][3:]), int(column[3:])
                    found[pair] = _STATUS.get(word, "unknown")
    return found
