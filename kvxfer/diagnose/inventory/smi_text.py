"""``nvidia-smi -q`` and ``nvidia-smi nvlink -s``: GPUs from text, where NVML cannot be asked."""

import re
from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from kvxfer.diagnose.facts import Fabric, Gpu, NvLink, PcieLink, format_pci
from kvxfer.diagnose.inventory.fabric_health import FIELDS, describe_health

_GPU = re.compile(r"GPU ([0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s*")
_FIELD = re.compile(r"( +)([^:]+?)\s*(?::\s(.*))?")
_LINK_GPU = re.compile(r"GPU (\d{1,4}): (.*?)\s*\(UUID: ([^)]*)\)\s*")
_LINK = re.compile(r"\s*Link (\d{1,4}):\s*(.*?)\s*")
_NO_LINK = re.compile(r".*all links are inactive.*", re.IGNORECASE)  # instead of its links
_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,6})?) GB/s(?:ec)?")
_DOWN = {"inactive", "disabled", "down", "off"}
_UNKNOWN = {"", "n/a", "err!", "unknown error", "requested functionality has been deprecated"}
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
    """The GPUs of ``nvidia-smi nvlink -s`` and their links.

    Where the tool says of a GPU that all its links are inactive it counts none: one stands for all.
    """
    found: list[tuple[Gpu, list[NvLink]]] = []
    for line in text.splitlines():
        if match := _LINK_GPU.fullmatch(line):
            found.append((Gpu(index=int(match[1]), name=match[2], uuid=match[3]), []))
        elif (match := _LINK.fullmatch(line)) and found:
            found[-1][1].append(_link_of(int(match[1]), match[2]))
        elif _NO_LINK.fullmatch(line) and found:
            found[-1][1].append(NvLink(index=0, active=False))
    return [replace(gpu, links=tuple(links)) for gpu, links in found]


def _link_of(index: int, state: str) -> NvLink:
    """Up where it has a rate, down where a word says so; of any other word unknown."""
    rate = _RATE.fullmatch(state)
    if rate and float(rate[1]):
        return NvLink(index=index, active=True, gb_per_s=float(rate[1]))
    return NvLink(index=index, active=False if state.strip("<>[]").lower() in _DOWN else None)


def join_links(gpus: Sequence[Gpu], linked: Sequence[Gpu]) -> list[Gpu] | None:
    """GPUs of :func:`parse_query` with the links of :func:`parse_nvlink`; None: of other GPUs.

    By UUID where no two are alike and one text has all of the other's; else, as where they were
    made unrecognizable, by index, where the names agree.
    """
    ours, theirs = Counter(gpu.uuid for gpu in gpus), Counter(gpu.uuid for gpu in linked)
    are_distinct = max((*ours.values(), *theirs.values()), default=1) == 1
    if are_distinct and (ours.keys() <= theirs.keys() or theirs.keys() <= ours.keys()):
        by_uuid = {gpu.uuid: gpu.links for gpu in linked}
        return [replace(gpu, links=by_uuid.get(gpu.uuid)) for gpu in gpus]
    names = {gpu.index: gpu.name for gpu in gpus}
    if any(names.get(gpu.index) not in ("", gpu.name) for gpu in linked):
        return None
    by_index = {gpu.index: gpu.links for gpu in linked}
    return [replace(gpu, links=by_index.get(gpu.index)) for gpu in gpus]


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
        row_remap_failed=_yes(fields, "Remapped Rows", "Remapping Failure Occurred"),
        row_remap_pending=_yes(fields, "Remapped Rows", "Pending"),
    )


def _fabric_of(state: str, fields: _Fields) -> Fabric:
    return Fabric(
        state=state.lower(),
        status=(_text(fields, "Fabric", "Status") or "").lower(),
        clique=_number(fields, "Fabric", "CliqueId"),
        cluster=_text(fields, "Fabric", "ClusterUUID") or "",
        health=describe_health(
            {
                name: value
                for name in FIELDS
                if (value := _text(fields, "Fabric", "Health", name)) is not None
            }
        ),
    )


def _yes(fields: _Fields, *path: str) -> bool | None:
    value = _text(fields, *path)
    return None if value is None else value.lower() == "yes"


def _text(fields: _Fields, *path: str) -> str | None:
    value = fields.get(path)
    return None if value is None or value.strip("[]").lower() in _UNKNOWN else value


def _number(fields: _Fields, *path: str) -> int | None:
    match = re.match(r"\d{1,10}\b|\d{1,3}x", fields.get(path, ""))
    return int(match[0].removesuffix("x")) if match else None
