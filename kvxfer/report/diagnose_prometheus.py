"""A diagnosis for the textfile collector of Prometheus's node exporter.

The text format is that of Prometheus's documentation, "Exposition formats".
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvxfer.diagnose.figures import Figure
from kvxfer.diagnose.result import DiagnoseReport
from kvxfer.whole_file import READABLE, write_whole

_Sample = tuple[Mapping[str, str], float]
_PREFIX = "kvxfer_diagnose_"


def to_prometheus(report: DiagnoseReport) -> str:
    """All metrics, as gauges."""
    figures = report.figures.all
    right = [figure for figure in figures if figure.is_right]
    families = (
        _family(
            "check_verdict",
            "Verdict of a check: 0 N/A, 1 PASS, 2 WARN, 3 FAIL.",
            [({"check": one.check}, one.verdict.rank) for one in report.checks],
        ),
        _family(
            "rate_bytes_per_second",
            "Payload a second, every byte compared.",
            [(_ends(one), one.gb_per_s * 1e9) for one in right if one.gb_per_s is not None],
        ),
        _family(
            "read_latency_seconds",
            "One read of another GPU's memory.",
            [(_ends(one), one.latency_ns / 1e9) for one in right if one.latency_ns is not None],
        ),
        _family(
            "wrong_words",
            "Words of 8 bytes that arrived wrong.",
            [(_ends(one), one.num_wrong) for one in figures if one.rounds],
        ),
        _family("duration_seconds", "How long the diagnosis took.", [({}, report.elapsed_s)]),
    )
    return "".join(families)


def write_prometheus(path: str, report: DiagnoseReport) -> None:
    """Write the metrics in one step: the collector never reads half a file.

    Raises:
        InvalidUsage: it cannot be written, or is there and no regular file, which this would put
            one in the place of; names the path and the cause.
    """
    write_whole(Path(path), to_prometheus(report).encode(), mode=READABLE)


def _ends(figure: Figure) -> dict[str, str]:
    return {"kind": figure.kind, "src": figure.src, "dst": figure.dst}


def _family(name: str, text: str, samples: Sequence[_Sample]) -> str:
    if not samples:
        return ""
    full = f"{_PREFIX}{name}"
    lines = [f"# HELP {full} {text}", f"# TYPE {full} gauge"]
    lines += [f"{full}{_labels(labels)} {float(value)!r}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    parts = [f'{name}="{_escaped(value)}"' for name, value in labels.items()]
    return f"{{{','.join(parts)}}}" if parts else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
