"""A diagnosis as a table, a page, metrics and a comparison."""

import os
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from captures import write_capture
from diagnose_nodes import healthy_figures, switched_node
from msgspec.structs import replace
from rich.console import Console

from kvxfer.diagnose.checks import run_checks
from kvxfer.diagnose.compare import changes_since, read_report
from kvxfer.diagnose.facts import Facts
from kvxfer.diagnose.figures import BOTH_WAYS, ENGINE, PAGED, Figure, Figures
from kvxfer.diagnose.limits import with_limits
from kvxfer.diagnose.result import SCHEMA, DiagnoseReport, Verdict
from kvxfer.diagnose.run import diagnose_folder
from kvxfer.errors import InvalidUsage
from kvxfer.report.diagnose_html import faulty_devices, to_html
from kvxfer.report.diagnose_prometheus import to_prometheus, write_prometheus
from kvxfer.report.diagnose_svg import heat_map, topology
from kvxfer.report.diagnose_table import print_diagnosis

WRONG = (ENGINE, "gpu0", "gpu1")
HUNG = (PAGED, "gpu1", "gpu0")


def faulty(one: Figure) -> Figure:
    if one.key == WRONG:
        return replace(one, num_wrong=4, first_wrong="page <3>")
    if one.key == HUNG:
        return replace(one, gb_per_s=None, error="it hung")
    return one


def report_of(facts: Facts, figures: Figures) -> DiagnoseReport:
    figures = with_limits(facts, figures)
    checks = run_checks(facts, figures)
    return DiagnoseReport(
        schema=SCHEMA, environment={"date": "x"}, facts=facts, figures=figures, checks=checks
    )


@pytest.fixture
def report() -> DiagnoseReport:
    return report_of(switched_node(4), healthy_figures(4, faulty))


def printed(report: DiagnoseReport) -> str:
    console = Console(width=160, force_terminal=False)
    with console.capture() as captured:
        print_diagnosis(report, console)
    return captured.get()


def test_the_table_says_what_is_wrong_first(report: DiagnoseReport) -> None:
    text = printed(report)
    assert "4 x NVIDIA H200, 18 NVLinks each" in text
    assert text.index("FAIL  bytes") < text.index("FAIL  measured") < text.index("from \\ to")
    assert "WRONG" in text
    assert "ERROR" in text
    assert text.count("remedy:") == 2
    assert "PASS both-ways" in text


def test_many_findings_are_cut_and_counted() -> None:
    slow = healthy_figures(8, lambda one: replace(one, gb_per_s=(one.gb_per_s or 0) / 3))
    text = printed(report_of(switched_node(8), slow))
    assert "and 48 more; --json has all of them" in text


class Page(HTMLParser):
    """Collects what a browser would load from elsewhere, and checks that tags close."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe"):
            self.loads.append(tag)
        self.loads += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone(report: DiagnoseReport) -> None:
    text = to_html(report)
    page = Page()
    page.feed(text)
    assert (page.open, page.loads) == ([], [])
    assert "page &lt;3&gt;" in text
    assert text.count("<svg") == 4  # the topology and three heat maps


def test_a_page_of_a_host_without_gpus(tmp_path: Path) -> None:
    text = to_html(diagnose_folder(write_capture("cpu_only", tmp_path)))
    assert "<svg" not in text
    assert "There was nothing to test" in text
    assert "Nothing is wrong" not in text


def texts_of(svg: str) -> list[str]:
    return [
        one.text or "" for one in ElementTree.fromstring(svg).iter() if one.tag.endswith("text")
    ]


def fills_of(svg: str) -> list[str]:
    return [one.get("fill", "") for one in ElementTree.fromstring(svg).iter() if "rect" in one.tag]


def test_the_heat_map_tells_the_slow_pair_apart(report: DiagnoseReport) -> None:
    slow = with_limits(
        report.facts,
        healthy_figures(4, lambda one: replace(one, gb_per_s=150.0) if one.key == WRONG else one),
    )
    fills = fills_of(heat_map(slow, ENGINE, report.facts))
    assert len(fills) == 12
    assert fills.count(fills[0]) == 1  # GPU 0 to 1
    assert len(set(fills)) == 2
    assert "WRONG" in texts_of(heat_map(report.figures, ENGINE, report.facts))


def test_a_heat_map_of_pairs_has_a_cell_for_either_way(report: DiagnoseReport) -> None:
    cells = texts_of(heat_map(report.figures, BOTH_WAYS, report.facts))
    assert cells.count("-") == 6  # measured once a pair


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hgx_h100", ["mlx5_7 400G", "NUMA node 1", "GPU 7"]),
        ("pcie_pair", ["pairs without NVLink: SYS", "GPU 1"]),
        ("h100_nvl_pair", ["NV12"]),
        ("nic_down", ["mlx5_3 down"]),
        ("numa_not_told", ["NUMA node unknown"]),
    ],
)
def test_the_topology_shows_the_node(name: str, words: list[str], tmp_path: Path) -> None:
    report = diagnose_folder(write_capture(name, tmp_path))
    found = texts_of(topology(report.facts, faulty_devices(report)))
    assert set(words) <= set(found)


def test_switches_are_drawn_with_the_state_of_their_fabric(report: DiagnoseReport) -> None:
    found = texts_of(topology(report.facts, []))
    assert "NVSwitch (fabric state unknown)" in found
    assert found.count("18 links") == 4


def test_devices_with_findings_are_named(tmp_path: Path) -> None:
    for name, devices in (("nic_down", ["mlx5_3"]), ("link_down", ["gpu5"])):
        report = diagnose_folder(write_capture(name, tmp_path / name))
        assert faulty_devices(report) == devices


def samples_of(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_metrics_hold_verdicts_rates_and_wrong_words(report: DiagnoseReport) -> None:
    text = to_prometheus(report)
    found = samples_of(text)
    ends = '{kind="copy engine",src="gpu1",dst="gpu0"}'
    rate = report.figures.get(ENGINE, "gpu1", "gpu0")
    assert rate is not None
    assert found[f"kvxfer_diagnose_rate_bytes_per_second{ends}"] == pytest.approx(
        (rate.gb_per_s or 0) * 1e9
    )
    assert found['kvxfer_diagnose_check_verdict{check="bytes"}'] == 3
    wrong = '{kind="copy engine",src="gpu0",dst="gpu1"}'
    assert found[f"kvxfer_diagnose_wrong_words{wrong}"] == 4
    assert f"kvxfer_diagnose_rate_bytes_per_second{wrong}" not in found  # no rate of wrong bytes
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert {name.split("{")[0] for name in found} == names


def test_metrics_replace_the_file_in_one_step(report: DiagnoseReport, tmp_path: Path) -> None:
    target = tmp_path / "kvxfer.prom"
    target.write_text("old")
    write_prometheus(str(target), report)
    assert [path.name for path in tmp_path.iterdir()] == ["kvxfer.prom"]
    assert target.stat().st_mode & 0o444 == 0o444
    with pytest.raises(InvalidUsage, match="cannot write"):
        write_prometheus(str(tmp_path / "none" / "x"), report)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # as /dev/full is: a device that root would have replaced by a file
    with pytest.raises(InvalidUsage, match="is no regular file"):
        write_prometheus(str(pipe), report)
    assert pipe.is_fifo()


def test_drift_is_found_and_only_the_worse_counts() -> None:
    facts = switched_node(4)
    old = report_of(facts, healthy_figures(4))
    new = report_of(switched_node(4, num_links=17), healthy_figures(4, faster_and_slower))
    found = changes_since(old, new)
    worse = {change.what for change in found if change.worse}
    assert {"NVLinks of GPU 0", f"{ENGINE} gpu0 -> gpu1", "check outliers"} <= worse
    assert [change.what for change in found if not change.worse] == [f"{PAGED} gpu1 -> gpu0"]
    assert changes_since(old, old) == []


def faster_and_slower(one: Figure) -> Figure:
    if one.key == WRONG:
        return replace(one, gb_per_s=300.0)
    return replace(one, gb_per_s=390.0) if one.key == HUNG else one


def test_a_gpu_that_went_is_worse_even_where_all_else_is_well() -> None:
    new = report_of(switched_node(3), healthy_figures(3))
    new.changes = changes_since(report_of(switched_node(4), healthy_figures(4)), new)
    assert new.verdict is Verdict.PASS
    assert new.has_finding
    assert "worse: GPU GPU-3: here -> gone" in printed(new)


def test_a_report_is_read_back(report: DiagnoseReport, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_bytes(msgspec.json.encode(report))
    assert read_report(str(path)) == report
    path.write_bytes(msgspec.json.encode(replace(report, schema="kvxfer.diagnose/9")))
    with pytest.raises(InvalidUsage, match="is of schema"):
        read_report(str(path))
    path.write_text("{}")
    with pytest.raises(InvalidUsage, match="is no report"):
        read_report(str(path))
    with pytest.raises(InvalidUsage, match="cannot read"):
        read_report(str(tmp_path / "none"))
