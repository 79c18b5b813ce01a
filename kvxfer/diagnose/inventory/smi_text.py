"""``nvidia-smi -q`` and ``nvidia-smi nvlink -s``: GPUs from text, where NVML cannot be asked."""

import re

from msgspec.structs import replace

from kvxfer.diagnose.facts import Fabric, Gpu, NvLink, PcieLink, format_pci

_GPU = re.compile(r"GPU ([0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s*")
_FIELD = re.compile(r"( +)([^:]+?)\s*(?::\s(.*))?")
_LINK_GPU = re.compile(r"GPU (\d+): (.*?)\s*\(UUID: ([^)]*)\)\s*")
_LINK = re.compile(r"\s*Link (\d+):\s*(.*?)\s*")
_RATE = re.compile(r"([0-9.]+) GB/s")
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
    """The GPUs of ``nvidia-smi nvlink -s`` and their links; both spellings of an inactive one."""
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
        status=(_text(fields, "Fabric", "Status") or "success").lower(),
        clique=_number(fields, "Fabric", "CliqueId"),
        cluster=_text(fields, "Fabric", "ClusterUUID") or "",
        health=(_text(fields, "Fabric", "Health", "Summary") or "").lower(),
    )


def _text(fields: _Fields, *path: str) -> str | None:
    value = fields.get(path)
    return None if value is None or value.lower() in _UNKNOWN else value


def _number(fields: _Fields, *path: str) -> int | None:
    match = re.match(r"\d+", fields.get(path, ""))
    return int(match[0]) if match else None
