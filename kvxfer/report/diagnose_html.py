"""A diagnosis as one HTML file: no script, no font and no picture from elsewhere."""

import re
from collections.abc import Sequence
from html import escape

from kvxfer.diagnose.figures import BOTH_WAYS, ENGINE, PAGED, PAIR_KINDS, gpu_name
from kvxfer.diagnose.result import CheckResult, DiagnoseReport, Verdict
from kvxfer.report.diagnose_svg import heat_map, topology
from kvxfer.report.diagnose_table import cell_of, describe_node, summary_of

_HEAT_MAPS = (
    (ENGINE, "Copy engine, one contiguous copy"),
    (PAGED, "Shuffled pages of 16 KiB, eight SMs"),
    (BOTH_WAYS, "Both ways at once, the sum"),
)
_CLASSES = {
    Verdict.FAIL: "fail",
    Verdict.WARN: "warn",
    Verdict.PASS: "pass",
    Verdict.NOT_APPLICABLE: "na",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; margin: 2rem auto; max-width: 1200px;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid #e3e7ee;
  vertical-align: top; }
.tag { border-radius: 4px; padding: .1rem .5rem; font-weight: 600; color: #fff; }
.fail .tag { background: #c62828; } .warn .tag { background: #b26a00; }
.pass .tag { background: #2e7d32; } .na .tag { background: #8a94a6; }
.maps { display: flex; flex-wrap: wrap; gap: 1.5rem; } figure { margin: 0; max-width: 100%; }
figure svg { max-width: 100%; height: auto; }
figcaption { color: #5a6475; } .finding { margin: 0 0 .6rem; } .cause { color: #5a6475; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
"""


def to_html(report: DiagnoseReport) -> str:
    """The whole page: the verdict, what is wrong, the node, the pairs, all checks, all figures."""
    title = f"kvxfer diagnose: {describe_node(report.facts)}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="{_CLASSES[report.verdict]}"><span class="tag">{report.verdict.value}</span> '
        f"{escape(summary_of(report))}</p>",
        _findings(report),
        _topology(report),
        _heat_maps(report),
        _checks(report.checks),
        _rates(report),
        _environment(report),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        + "".join(body)
        + "</body></html>\n"
    )


def faulty_devices(report: DiagnoseReport) -> list[str]:
    """``gpu3`` and NICs that a finding is about; pairs are in the heat map."""
    gpus = [gpu_name(gpu.index) for gpu in report.facts.gpus or ()]
    names = [*gpus, *(nic.name for nic in report.facts.nics)]
    faulty = set[str]()
    for result in report.checks:
        for finding in result.findings:
            words = set(re.split(r"[ ,()]+", finding.where.replace("GPU ", "gpu")))
            devices = words.intersection(names)
            faulty |= devices if len(devices) == 1 else set()
    return [name for name in names if name in faulty]


def _findings(report: DiagnoseReport) -> str:
    parts = [
        f'<div class="finding {_CLASSES[finding.verdict]}"><span class="tag">'
        f"{finding.verdict.value}</span> <b>{escape(finding.where)}</b>: "
        f"{escape(finding.evidence)}<br><span class='cause'>{escape(finding.cause)}.</span> "
        f"<b>Remedy:</b> {escape(finding.remedy)}.</div>"
        for result in report.checks
        for finding in result.findings
    ]
    if parts:
        return f"<h2>What is wrong</h2>{''.join(parts)}"
    nothing = report.verdict is Verdict.NOT_APPLICABLE
    return f"<p>{'There was nothing to test.' if nothing else 'Nothing is wrong.'}</p>"


def _topology(report: DiagnoseReport) -> str:
    if not report.facts.gpus and not report.facts.hardware_nics:
        return ""
    picture = topology(report.facts, faulty_devices(report))
    return f"<h2>The node</h2><figure>{picture}</figure>"


def _heat_maps(report: DiagnoseReport) -> str:
    maps = [
        f"<figure>{heat_map(report.figures, kind, report.facts)}"
        f"<figcaption>{escape(title)}, GB/s</figcaption></figure>"
        for kind, title in _HEAT_MAPS
        if report.figures.of(kind)
    ]
    if not maps:
        return ""
    note = "From the row to the column; the colour is of the best pair, red at half of it or less."
    return f"<h2>Pairs of GPUs</h2><p>{note}</p><div class='maps'>{''.join(maps)}</div>"


def _checks(results: Sequence[CheckResult]) -> str:
    rows = [
        f'<tr class="{_CLASSES[result.verdict]}"><td><span class="tag">{result.verdict.value}'
        f"</span></td><td>{escape(result.check)}</td><td>{escape(result.title)}?</td><td>"
        f"{escape(result.evidence or f'{len(result.findings)} findings, above')}</td></tr>"
        for result in results
    ]
    return f"<h2>All checks</h2><table>{''.join(rows)}</table>"


def _rates(report: DiagnoseReport) -> str:
    """What no heat map shows."""
    rows = []
    for figure in report.figures.all:
        if figure.kind in PAIR_KINDS:
            continue
        limit, fraction = figure.limit_gb_per_s, figure.fraction_of_limit
        cells = (
            cell_of(figure),
            "" if limit is None else f"{limit:.1f}",
            "" if fraction is None else f"{fraction:.0%}",
        )
        numbers = "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)
        ends = "".join(f"<td>{escape(x)}</td>" for x in (figure.kind, figure.src, figure.dst))
        rows.append(f"<tr>{ends}{numbers}</tr>")
    if not rows:
        return ""
    names = ("what", "from", "to", "GB/s", "limit", "of limit")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<h2>Other rates</h2><table><tr>{head}</tr>{''.join(rows)}</table>"


def _environment(report: DiagnoseReport) -> str:
    rows = [
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
        for name, value in {**report.environment, **report.facts.sources}.items()
    ]
    return f"<h2>Where and when</h2><table>{''.join(rows)}</table>"
