"""``kvxfer pd report``: the figures in cells, one page that stands alone, exit statuses."""

import io
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from pd_runs import Bench, Engines, Result
from rich.console import Console

from kvxfer.cli.main import main
from kvxfer.pd.analysis import analyse, parse_objectives
from kvxfer.pd.summary import Distribution, Load, RunSummary
from kvxfer.report.pd_cdf import Line, Panel, draw
from kvxfer.report.pd_figures import rows_of
from kvxfer.report.pd_table import print_run
from kvxfer.report.pd_words import findings_of, format_ms, sentences
from kvxfer.units import format_tokens

LOAD = Load(8192, 128)
HOSTILE = "<script>alert(1)</script>"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two set-ups at three concurrencies and a prefill engine alone."""
    path = tmp_path_factory.mktemp("run")
    bench = Bench(path)
    bench.all("agg", Engines(step_s=4e-3), [1, 4, 16])
    bench.setup("pd", Engines(kind="pd"), devices=[HOSTILE])
    for concurrency in (1, 4, 16):
        bench.point("pd", Engines(kind="pd"), concurrency, chat=True)
    bench.all("alone", Engines(kind="prefill_only"), [1], osl=1)
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> RunSummary:
    return analyse(folder, objectives=parse_objectives("ttft:2000,itl:p99:30"))


def test_cells_are_the_figures(run: RunSummary) -> None:
    rows = {(row.figure, row.setup): row.cells for row in rows_of(run, LOAD, [50, 99])}
    for setup in run.serving:
        for at, concurrency in enumerate((1, 4, 16)):
            point = setup.at(LOAD, concurrency)
            assert point is not None
            wanted = {
                "TTFT P50": format_ms(point.ttft.percentile(50)),
                "ITL P99": format_ms(point.itl.percentile(99)),
                "requests/s": f"{point.requests_per_s:.3g}",
                "first gap P99": ("" if concurrency == 16 else "~")
                + format_ms(point.first_gap.percentile(99)),
            }
            for figure, text in wanted.items():
                assert rows[figure, setup.setup.name][at].text == text
    assert {setup for figure, setup in rows if figure.startswith("hand-over")} == {"pd"}
    assert [cell.text == "" for cell in rows["hand-over P50", "pd"]] == [False, True, True]
    assert ("failed", "agg") not in rows


def test_the_best_are_marked_and_even_ones_are_not(run: RunSummary) -> None:
    rows = {(row.figure, row.setup): row.cells for row in rows_of(run, LOAD, [99])}
    marks = {name: [cell.best for cell in rows["ITL P99", name]] for name in ("agg", "pd")}
    assert marks["pd"][-1]
    assert not marks["agg"][-1]
    assert marks["agg"][0]
    shares = [cell.best for name in ("agg", "pd") for cell in rows["stalled", name]]
    assert not any(shares)


def test_sentences_say_who_wins_with_the_figures(run: RunSummary) -> None:
    first, *_, last = sentences(run, LOAD)
    point = {one.setup.name: one.at(LOAD, 16) for one in run.serving}
    assert point["pd"] is not None
    assert point["agg"] is not None
    pd, agg = (format_ms(point[name].itl.percentile(99)) for name in ("pd", "agg"))  # type: ignore[union-attr]
    assert first.startswith("ITL P99: agg at 1 concurrent (")
    assert first.endswith(f"pd at 4 to 16 concurrent (at 16: pd {pd}, agg {agg} ms).")
    assert last == "Not the same number of devices: agg 1, pd 2."


def test_figures_are_short_and_exact() -> None:
    values = (0.01234, 1.234, 12.34, 99.94, 99.96, 123.4, 12345.6)
    wanted = ["0.0123", "1.23", "12.3", "99.9", "100", "123", "12346"]
    assert [format_ms(value) for value in values] == wanted
    assert [format_tokens(count) for count in (16, 1000, 1024, 8192, 8200)] == [
        "16",
        "1000",
        "1k",
        "8k",
        "8200",
    ]


def test_one_finding_of_many_points_is_said_once(run: RunSummary) -> None:
    ((serious, text),) = findings_of(run)
    assert not serious
    assert text.startswith("pd, 8k in, 128 out, 1 concurrent and 2 more: ")


_VOID = {"meta", "link", "img"}


class _Page(HTMLParser):
    """Elements that are open, everything that refers to something, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in _VOID:
            self.open.append(tag)
        self._note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self._note(attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def _note(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src", "xlink:href", "srcset", "action"):
                self.links.append(value or "")
            if name == "id":
                self.ids.add(value or "")


def self_contained(text: str) -> list[str]:
    """What a page needs beside itself, or runs."""
    page = _Page(text)
    outside = [link for link in page.links if link.removeprefix("#") not in page.ids]
    outside += re.findall(r"https?:|@import|url\((?!#)", text)
    return outside + [tag for tag in page.seen if tag in ("script", "link", "iframe", "object")]


def test_the_page_stands_alone_and_holds_everything(
    folder: Path, run: RunSummary, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    arguments = ["--slo", "ttft:2000,itl:p99:30", "--percentiles", "50,99", "--html", str(path)]
    assert main(["pd", "report", str(folder), *arguments]) == 0
    text = path.read_text()
    assert self_contained(text) == []
    page = _Page(text)
    assert page.open == []
    assert page.seen.count("svg") == 4
    for row in rows_of(run, LOAD, [50, 99]):
        assert all(cell.text in page.text for cell in row.cells)
    for sentence in sentences(run, LOAD):
        assert sentence in page.text
    assert HOSTILE in page.text  # as text


@pytest.mark.parametrize(
    "planted",
    [
        '<img src="http://a/b.png">',
        '<a href="#nowhere">a</a>',
        "<script>alert(1)</script>",
        "<style>@import 'a.css'</style>",
        '<link rel="stylesheet" href="#">',
    ],
)
def test_a_page_that_needs_more_is_seen(planted: str) -> None:
    assert self_contained(f"<html><body>{planted}</body></html>")
    assert not self_contained('<html><body><svg><path id="a"/><use href="#a"/></svg></body></html>')


@pytest.mark.parametrize(
    "values_ms", [[245.0, 245.0 + 1e-13, 245.0 - 1e-13], [0.0, 0.0], [1e-3, 1.1e-3], [12.0, 90.0]]
)
def test_equal_times_are_a_line_within_an_axis_that_has_numbers(values_ms: list[float]) -> None:
    pytest.importorskip("matplotlib")
    line = Line("one", "black", Distribution.of(np.array(values_ms)))
    panel = Panel("TTFT", "ms", [line], tail=False)
    (axes,) = draw("a title", [panel], key=True).figure.axes
    low, high = axes.get_xlim()
    assert low < min(values_ms) - 0.01 * max(values_ms)
    assert high > max(values_ms)
    ticks = axes.get_xticks()
    assert len(ticks) >= 2
    assert min(ticks) >= 0.0


def test_pictures_are_written(folder: Path, tmp_path: Path) -> None:
    assert main(["pd", "report", str(folder), "--png", str(tmp_path / "png")]) == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "png").iterdir()}
    assert set(files) == {
        f"i8192-o128-{name}.png" for name in ("itl", "ttft", "first-gap", "setups")
    }
    assert all(content.startswith(b"\x89PNG\r\n") for content in files.values())
    assert len(set(files.values())) == len(files)


def test_the_terminal_shows_tables_and_winners(folder: Path, capsys: Capture) -> None:
    assert main(["pd", "report", str(folder), "--percentiles", "99.5"]) == 0
    out = capsys.readouterr().out
    assert "8k in, 128 out" in out
    assert "ITL P99.5" in out
    assert "TTFT P50:" in out
    assert "good req/s" not in out


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [40, 50, 80, 200])
def test_no_cell_is_cut(width: int, terminal: bool, run: RunSummary) -> None:
    out = io.StringIO()
    print_run(run, Console(file=out, width=width, force_terminal=terminal, no_color=True))
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    words = text.split()
    assert "…" not in text
    for row in rows_of(run, LOAD, [50, 90, 99]):
        assert row.figure in text
        assert all(cell.text in words for cell in row.cells if cell.text)
    tables = [line for line in text.splitlines() if line.startswith(("  TTFT", "  ITL"))]
    assert not terminal or all(len(line) <= width for line in tables)


def test_without_the_library_figures_remain(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["pd", "report", str(folder)]) == 0
    assert main(["pd", "report", str(folder), "--html", str(tmp_path / "a.html")]) == 3
    assert "pip install matplotlib" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_serious_finding_is_a_failed_check(tmp_path: Path, capsys: Capture) -> None:
    def fail(result: Result) -> None:
        result["errors"][0], result["output_lens"][0] = "reset", 0
        result["completed"] -= 1

    bench = Bench(tmp_path)
    bench.setup("one", Engines())
    bench.point("one", Engines(), 2, osl=8, spoil=fail)
    assert main(["pd", "report", str(tmp_path)]) == 1
    assert "FAULT: one, 8k in, 8 out, 2 concurrent: 1 of 20 requests failed: reset" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--slo", "latency:5"],
        ["--percentiles", "101"],
        ["--percentiles", "p99"],
        ["--percentiles", ","],
        ["--token-budget", "0"],
        ["--html", "/nowhere/page.html"],
        ["--png", "/proc/pictures"],
    ],
)
def test_wrong_usage_is_status_2(arguments: list[str], folder: Path) -> None:
    assert main(["pd", "report", str(folder), *arguments]) == 2


def test_a_folder_without_a_run_is_status_2(tmp_path: Path, capsys: Capture) -> None:
    assert main(["pd", "report", str(tmp_path)]) == 2
    assert "kvxfer pd bench" in capsys.readouterr().err


def test_one_setup_has_no_rivals(tmp_path: Path) -> None:
    Bench(tmp_path).all("one", Engines(), [4], osl=16)
    alone = analyse(tmp_path)
    load = Load(8192, 16)
    assert sentences(alone, load) == []
    assert not any(cell.best for row in rows_of(alone, load, [50]) for cell in row.cells)
    assert main(["pd", "report", str(tmp_path), "--png", str(tmp_path / "png")]) == 0
