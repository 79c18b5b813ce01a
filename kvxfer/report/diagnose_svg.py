"""Two pictures of a diagnosis, as SVG: its heat map of pairs, and the node's topology."""

from collections.abc import Sequence
from html import escape

from kvxfer.diagnose.facts import Facts, Gpu, GpuPair, Nic
from kvxfer.diagnose.figures import Figure, Figures, gpu_name
from kvxfer.report.diagnose_table import cell_of

_CELL, _LABEL = 64, 58
_INK, _FAINT, _PAPER = "#1c2430", "#8a94a6", "#ffffff"
_RED, _AMBER = "#c62828", "#e08a00"
# From the worst to the best: colours that also differ in lightness.
_SCALE = ("#a50026", "#f46d43", "#fee08b", "#a6d96a", "#1a9850")
_GPU_WIDTH, _GPU_HEIGHT, _GAP = 116, 54, 24
_NIC_HEIGHT = 30


def heat_map(figures: Figures, kind: str, facts: Facts) -> str:
    """Sources down, destinations across; colour is the fraction of the best pair."""
    names = [gpu_name(gpu.index) for gpu in facts.gpus or ()]
    found = {(one.src, one.dst): one for one in figures.of(kind)}
    best = max((one.gb_per_s or 0.0 for one in found.values() if one.is_right), default=0.0)
    parts = []
    for column, name in enumerate(names):
        x = _LABEL + column * _CELL + _CELL / 2
        parts.append(_text(x, _LABEL - 10, name, size=12, fill=_FAINT))
        parts.append(_text(_LABEL - 8, x + 4, name, size=12, fill=_FAINT, anchor="end"))
    for row, src in enumerate(names):
        for column, dst in enumerate(names):
            figure = found.get((src, dst))
            if src != dst:
                parts.append(_heat_cell(row, column, figure, best, f"{src} to {dst}"))
    size = _LABEL + len(names) * _CELL + 8
    return _svg(size, size, parts, f"heat map, {kind}")


def _heat_cell(row: int, column: int, figure: Figure | None, best: float, where: str) -> str:
    x, y = _LABEL + column * _CELL, _LABEL + row * _CELL
    fill, ink = _colour(figure, best)
    title = f"{where}: {_long_text(figure)}"
    return (
        f"<g><title>{escape(title)}</title>"
        f'<rect x="{x + 1}" y="{y + 1}" width="{_CELL - 2}" height="{_CELL - 2}" rx="4" '
        f'fill="{fill}"/>'
        + _text(x + _CELL / 2, y + _CELL / 2 + 5, cell_of(figure), size=14, fill=ink)
        + "</g>"
    )


def _colour(figure: Figure | None, best: float) -> tuple[str, str]:
    if figure is None or (figure.is_right and figure.gb_per_s is None):
        return "#e8ebf0", _FAINT
    if not figure.is_right:
        return _INK, "#ff6b6b"
    fraction = (figure.gb_per_s or 0.0) / best if best else 0.0
    # What is below half of the best is as bad as it gets; the upper half is told apart.
    position = min(max((fraction - 0.5) / 0.5, 0.0), 1.0)
    index = min(int(position * len(_SCALE)), len(_SCALE) - 1)
    return _SCALE[index], _PAPER if index in (0, len(_SCALE) - 1) else _INK


def _long_text(figure: Figure | None) -> str:
    if figure is None:
        return "not measured"
    if not figure.is_right:
        return figure.error or f"{figure.num_wrong} wrong words, first {figure.first_wrong}"
    limit = figure.limit_gb_per_s
    of_limit = f" of {limit:.1f} ({figure.limit_source})" if limit else ""
    return f"{figure.gb_per_s or 0.0:.1f} GB/s{of_limit}"


def topology(facts: Facts, faulty: Sequence[str]) -> str:
    """NUMA nodes as boxes with their GPUs and NICs; what joins the GPUs above them.

    Args:
        facts: the node.
        faulty: names (``gpu3``, ``mlx5_0``) that have a finding, drawn in red.
    """
    nodes: dict[int | None, tuple[list[Gpu], list[Nic]]] = {}
    for gpu in facts.gpus or ():
        nodes.setdefault(gpu.numa_node, ([], []))[0].append(gpu)
    for nic in facts.hardware_nics:
        nodes.setdefault(nic.numa_node, ([], []))[1].append(nic)
    parts: list[str] = []
    left, fabric_top, top = _GAP, 12, 92
    centres: dict[int, float] = {}
    height = top
    for index in sorted(nodes, key=lambda node: -1 if node is None else node):
        gpus, nics = nodes[index]
        columns = max(len(gpus), (len(nics) + 1) // 2, 1)
        width = columns * (_GPU_WIDTH + 12) + 12
        rows = -(-len(nics) // columns)
        box_height = 32 + _GPU_HEIGHT + 14 + rows * (_NIC_HEIGHT + 8) + 20
        parts.append(_box(left, top, width, box_height, fill="#f4f6fa", stroke="#cdd4df"))
        name = "NUMA node unknown" if index is None else f"NUMA node {index}"
        label_y = top + box_height - 10  # below the wires
        parts.append(_text(left + 12, label_y, name, size=12, fill=_FAINT, anchor="start"))
        for column, gpu in enumerate(gpus):
            x = left + 12 + column * (_GPU_WIDTH + 12)
            centres[gpu.index] = x + _GPU_WIDTH / 2
            parts.append(_gpu_box(x, top + 32, gpu, gpu_name(gpu.index) in faulty))
        for place, nic in enumerate(nics):
            x = left + 12 + (place % columns) * (_GPU_WIDTH + 12)
            y = top + 32 + _GPU_HEIGHT + 14 + (place // columns) * (_NIC_HEIGHT + 8)
            parts.append(_nic_box(x, y, nic, nic.name in faulty))
        left += width + _GAP
        height = max(height, top + box_height + _GAP)
    width = max(left, 2 * _GAP + 320)
    wires = _wires(facts, centres, fabric_top, top + 32, width)
    return _svg(width, height, [*parts, *wires], "topology")


def _wires(
    facts: Facts, centres: dict[int, float], fabric_top: float, gpu_top: float, width: float
) -> list[str]:
    """A bar where NVLink joins all, arcs where it joins some, and words for what PCIe joins."""
    pairs = [pair for pair in facts.pairs if pair.src < pair.dst]
    linked = [pair for pair in pairs if pair.num_nvlinks]
    gpus = facts.gpus or ()
    switched = any(link.remote == "switch" for gpu in gpus for link in gpu.active_links)
    if switched or (len(gpus) > 2 and len(linked) == len(pairs)):
        name = f"NVSwitch ({_state_of(facts)})" if switched else "NVLink, every pair"
        bar = _box(_GAP, fabric_top, width - 2 * _GAP, 30, fill="#dff3e4", stroke="#3b8f55")
        return [
            bar,
            _text(width / 2, fabric_top + 20, name, size=13),
            *(_wire(centres[gpu.index], fabric_top + 30, gpu_top, gpu) for gpu in gpus),
        ]
    others = sorted({pair.path for pair in pairs if pair.path and not pair.num_nvlinks})
    parts = [_arc(centres, pair, gpu_top) for pair in linked]
    if others:
        text = f"pairs without NVLink: {', '.join(others)}"
        parts.append(_text(_GAP, fabric_top + 8, text, size=12, fill=_FAINT, anchor="start"))
    return parts


def _state_of(facts: Facts) -> str:
    states = {gpu.fabric.state for gpu in facts.gpus or () if gpu.fabric is not None}
    return f"fabric {'/'.join(sorted(states))}" if states else "fabric state unknown"


def _wire(x: float, top: float, bottom: float, gpu: Gpu) -> str:
    num_links = len(gpu.active_links)
    label = f"{num_links} links" if num_links else ""
    return (
        f'<line x1="{x}" y1="{top}" x2="{x}" y2="{bottom}" stroke="#3b8f55" stroke-width="4"/>'
        + _text(x + 8, top + 20, label, size=11, anchor="start")
    )


def _arc(centres: dict[int, float], pair: GpuPair, gpu_top: float) -> str:
    """Higher for GPUs that are farther apart."""
    x1, x2 = centres.get(pair.src, 0.0), centres.get(pair.dst, 0.0)
    apex = gpu_top - min(40 + abs(x2 - x1) / 8, gpu_top - 24)
    middle = (x1 + x2) / 2
    return (
        f'<path d="M{x1} {gpu_top} Q{middle} {2 * apex - gpu_top} {x2} {gpu_top}" fill="none" '
        'stroke="#3b8f55" stroke-width="3"/>' + _text(middle, apex - 6, pair.path, size=12)
    )


def _gpu_box(x: float, y: float, gpu: Gpu, faulty: bool) -> str:
    fill, stroke = ("#fdecea", _RED) if faulty else (_PAPER, "#3b8f55")
    name = gpu.name.removeprefix("NVIDIA ")[:15] or "GPU"
    return (
        _box(x, y, _GPU_WIDTH, _GPU_HEIGHT, fill=fill, stroke=stroke)
        + _text(x + _GPU_WIDTH / 2, y + 22, f"GPU {gpu.index}", size=14)
        + _text(x + _GPU_WIDTH / 2, y + 42, name, size=11, fill=_FAINT)
    )


def _nic_box(x: float, y: float, nic: Nic, faulty: bool) -> str:
    fill, stroke = ("#fdecea", _RED) if faulty else (_PAPER, "#5b7db1")
    if not nic.active and not faulty:
        stroke = _AMBER
    rate = f" {nic.gbit_per_s:g}G" if nic.active else " down"
    return _box(x, y, _GPU_WIDTH, _NIC_HEIGHT, fill=fill, stroke=stroke) + _text(
        x + _GPU_WIDTH / 2, y + 20, nic.name + rate, size=12
    )


def _box(x: float, y: float, width: float, height: float, *, fill: str, stroke: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" '
        f'stroke="{stroke}" stroke-width="1.5"/>'
    )


def _text(
    x: float, y: float, text: str, *, size: int, fill: str = _INK, anchor: str = "middle"
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(label)}" '
        'font-family="system-ui, sans-serif">' + "".join(parts) + "</svg>"
    )
