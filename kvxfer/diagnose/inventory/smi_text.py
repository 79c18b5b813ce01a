"""``nvidia-smi -q`` and ``nvidia-smi nvlink -s``: GPUs from text, where NVML cannot be asked."""

import re

from msgspec.structs import replace

from kvxfer.diagnose.facts import Fabric, Gpu, NvLink, PcieLink, format_pci

_GPU = re.compile(r"GPU ([0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s*")
_FIELD = re.compile(r"( +)([^:]+?)\s*(?::\s(.*))?")
_LINK_GPU = re.compile(r"GPU (\d{1,4}): (.*?)\s*\(UUID: ([^)]*)\)\s*")
_LINK = re.compile(r"\s*Link (\d{1,4}):\s*(.*?)\s*")
_NO_LINK = re.compile(r".*all links are inactive.*", re.IGNORECASE)  # instead of its links
_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,6})?) GB/s")
_UNKNOWN = {"", "n/a", "[n/a]", "unknown error", "requested functionality has been deprecated"}
_Fields = dict[tuple[str, ...], str]


def parse_query(text: str) -> list[Gpu]:
    """The GPUs of ``nvidia-smi -q``, in its order."""
    sections: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if match := _GPU.fullmatch(line):
            sections.append((match[1], []))
        elif sections:
            sections[-1][1].append(line)
    return [_gpu_of(index, pci, _fields(lines)) for index, (pci, lines) in enumerate(sections)]


def parse_nvlink(text: str) -> list[Gpu]:
    """The GPUs of ``nvidia-smi nvlink -s`` and their links; both spellings of an inactive one.

    Where the tool says of a GPU that all its links are inactive it counts none: one stands for all.
    """
    found: list[tuple[Gpu, list[NvLink]]] = []
    for line in text.splitlines():
        if match := _LINK_GPU.fullmatch(line):
            found.append((Gpu(index=int(match[1]), name=match[2], uuid=match[3]), []))
        elif (match := _LINK.fullmatch(line)) and found:
            rate = _RATE.fullmatch(match[2])
            link = NvLink(
                index=int(match[1]),
                active="inactive" not in match[2].lower(),
                gb_per_s=float(rate[1]) if rate else None,
            )
            found[-1][1].append(link)
        elif _NO_LINK.fullmatch(line) and found:
            found[-1][1].append(NvLink(index=0, active=False))
    return [replace(gpu, links=tuple(links)) for gpu, links in found]


def _fields(lines: list[str]) -> _Fields:
    """``(section, ..., name)`` -> value, by indentation."""
    found: _Fields = {}
    above: list[tuple[int, str]] = []
    for line in lines:
        match = _FIELD.fullmatch(line.rstrip())
        if match is None:
            continue
        indent, name, value = len(match[1]), match[2], match[3]
        while above and above[-1][0] >= indent:
            above.pop()
        if value is None:
            above.append((indent, name))
        else:
            key = (*(section for _, section in above), name)
            found[key] = value.strip()
    return found


def _gpu_of(index: int, pci: str, fields: _Fields) -> Gpu:
    state = _text(fields, "Fabric", "State")
    mig = _text(fields, "MIG Mode", "Current")
    generation, width = (
        ("PCI", "GPU Link Info", "PCIe Generation"),
        ("PCI", "GPU Link Info", "Link Width"),
    )
    remap = _text(fields, "Remapped Rows", "Remapping Failure Occurred")
    return Gpu(
        index=index,
        name=_text(fields, "Product Name") or "",
        uuid=_text(fields, "GPU UUID") or "",
        pci=format_pci(pci),
        pcie=PcieLink(
            generation=_number(fields, *generation, "Current"),
            best_generation=_number(fields, *generation, "Max"),
            width=_number(fields, *width, "Current"),
            best_width=_number(fields, *width, "Max"),
        ),
        fabric=None if state is None else _fabric_of(state, fields),
        mig=None if mig is None else mig == "Enabled",
        row_remap_failed=None if remap is None else remap == "Yes",
    )


def _fabric_of(state: str, fields: _Fields) -> Fabric:
    return Fabric(
        state=state.lower(),
        status=(_text(fields, "Fabric", "Status") or "").lower(),
        clique=_number(fields, "Fabric", "CliqueId"),
        cluster=_text(fields, "Fabric", "ClusterUUID") or "",
        health=_fabric_health(fields),
    )


def _fabric_health(fields: _Fields) -> str:
    """The summary; drivers that print none tell of the bandwidth alone."""
    summary = _text(fields, "Fabric", "Health", "Summary")
    if summary is not None:
        return summary.lower()
    bandwidth = _text(fields, "Fabric", "Health", "Bandwidth")
    return "" if bandwidth in (None, "Full") else f"{bandwidth.lower()} in bandwidth"


def _text(fields: _Fields, *path: str) -> str | None:
    value = fields.get(path)
    return None if value is None or value.lower() in _UNKNOWN else value


def _number(fields: _Fields, *path: str) -> int | None:
    match = re.match(r"\d{1,10}\b|\d{1,3}x", fields.get(path, ""))
    return int(match[0].removesuffix("x")) if match else None
