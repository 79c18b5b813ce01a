"""Draw predicted against measured figures of a validation, a panel a part."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from kvxfer.pd.plan_summary import ValidatedPoint

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#333333")
BAND = 0.1


def draw(parts: dict[str, list[ValidatedPoint]], path: Path) -> None:
    """Write the picture: on the line a prediction is right, in the band within 10 %."""
    figure, grid = plt.subplots(1, len(parts), figsize=(4.4 * len(parts), 4.4), dpi=150)
    for axes, (name, points) in zip(grid, parts.items(), strict=True):
        _panel(axes, points)
        axes.set_title(name, loc="left", fontsize=11)
    figure.tight_layout()
    figure.savefig(path)


def _panel(axes: plt.Axes, points: list[ValidatedPoint]) -> None:
    figures = sorted({one.figure for point in points for one in point.comparisons})
    values = [
        value
        for point in points
        for one in point.comparisons
        for value in (one.measured, one.predicted)
    ]
    ends = [min(values) * 0.8, max(values) * 1.25]
    axes.fill_between(
        ends,
        [end * (1 - BAND) for end in ends],
        [end * (1 + BAND) for end in ends],
        color="#eeeeee",
        label="within 10 %",
    )
    axes.plot(ends, ends, color="#999999", linewidth=0.8)
    kinds = list(dict.fromkeys(figure.partition(" ")[0] for figure in figures))
    for colour, kind in zip(COLOURS, kinds, strict=False):
        for fitted in (False, True):
            pairs = [
                (one.measured, one.predicted)
                for point in points
                if point.fitted == fitted
                for one in point.comparisons
                if one.figure.partition(" ")[0] == kind
            ]
            if pairs:
                axes.scatter(
                    *zip(*pairs, strict=True),
                    s=22,
                    facecolors="none" if fitted else colour,
                    edgecolors=colour,
                    linewidths=0.9,
                    label=f"{kind}{', fitted' if fitted else ''}",
                )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    is_share = figures == ["stalled %"]
    axes.set_xlabel("closed form, % of gaps" if is_share else "measured, ms (requests/s)")
    axes.set_ylabel("simulated, % of gaps" if is_share else "predicted, ms (requests/s)")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
