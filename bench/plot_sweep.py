"""Draw GB/s against page size from the JSON of one or several raw sweeps of one run.

    python bench/plot_sweep.py OUT.svg kernel.json dma.json

Needs matplotlib. A curve a way of copying; the dashed line is the contiguous limit of the same run.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = ("#0b6e99", "#d9822b", "#7a7a7a", "#7b4fa0", "#4b8f3a")


def label_of(row: dict[str, Any]) -> str:
    """What was run, as the legend says it."""
    if row["actual_path"].find("copy engine") >= 0:
        return "one cudaMemcpyAsync a page"
    verb = "writes (put)" if row["op"] == "put" else "reads (get)"
    return f"kvxfer, {verb}, {row['sm_count']} SMs"


def curves(rows: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Points (page bytes, GB/s) by label."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        found.setdefault(label_of(row), []).append((row["page_bytes"], row["gb_per_s"]["p50"]))
    return {label: sorted(points) for label, points in found.items()}


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Write the picture."""
    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=150)
    for colour, (label, points) in zip(COLOURS, curves(rows).items(), strict=False):
        axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=label, linewidth=2)
    limit = statistics.median(row["limit_gb_per_s"] for row in rows)
    axes.axhline(limit, linestyle="--", color="black", linewidth=1)
    axes.text(4096, limit + 6, f"contiguous copy, same run: {limit:.0f} GB/s", fontsize=9)
    axes.set_xscale("log", base=2)
    sizes = sorted({row["page_bytes"] for row in rows})
    names = [f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB" for size in sizes]
    axes.set_xticks(sizes, names)
    axes.set_ylim(0, limit * 1.12)
    axes.set_xlabel("page size (1 GiB in shuffled pages, every byte checked)")
    axes.set_ylabel("GB/s, median")
    axes.set_title(title, fontsize=11)
    axes.grid(axis="y", color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="center left")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Read the arguments and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("json", type=Path, nargs="+")
    parser.add_argument("--sms", type=int, help="only this SM budget")
    args = parser.parse_args()
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in args.json]
    rows = [row for report in reports for row in report["results"]]
    facts = reports[0]["environment"]
    names = facts.get("gpus", facts["cpu"]).split(", ")
    host = f"{len(names)} x {names[0]}" if len(names) > 1 else names[0]
    if args.sms:
        rows = [row for row in rows if row["sm_count"] == args.sms]
    draw(rows, f"Paged KV between two processes: {host}, {facts['date'][:10]}", args.out)


if __name__ == "__main__":
    main()
