"""The record of an experiment, and what is made of it: text, drawings, a page that stands alone."""

import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from kvxfer.errors import InvalidUsage
from kvxfer.pd.experiment_result import (
    MAX_SAMPLES,
    MAX_SERIES,
    Axis,
    Bar,
    Bars,
    Column,
    Curve,
    Curves,
    Distributions,
    ExperimentResult,
    Figure,
    Limit,
    Said,
    Samples,
    Source,
    Table,
    load_result,
    save_result,
)
from kvxfer.pd.summary import Distribution
from kvxfer.report.experiment_page import experiment_page, write_report
from kvxfer.report.experiment_plots import draw_figure
from kvxfer.report.experiment_table import print_experiment

HOSTILE = "<script>alert(1)</script>"
LINES = [Curve("one", [1.0, 10.0], [5.0, 7.0]), Curve("two", [1.0, 10.0], [6.0, 6.5], "simulated")]
CURVES = Curves(
    title="a panel",
    x=Axis("load", "log"),
    y=Axis("time, ms"),
    series=LINES,
    limits=[Limit("SLO", 6.0)],
)
TAILS = Distributions(
    title="gaps",
    axis="ms",
    series=[Samples("4", [1.0, 2.0, 3.0]), Samples("16", [2.0, 9.0])],
    tail=True,
)
STACKED = Bars(
    title="parts",
    axis="ms",
    parts=["lookup", "copy"],
    bars=[Bar("full hit", [1.0, 3.0], "computed")],
)
RESULT = ExperimentResult(
    name="a-test",
    question=f"Is {HOSTILE} a question?",
    scale="quick",
    environment={"gpu": "none"},
    commands=["kvxfer pd experiment a-test"],
    sources=[Source("one", "measured"), Source("two", "simulated")],
    findings=[Said("two is later", "simulated")],
    tables=[
        Table(
            title="Times",
            how="recorded",
            columns=[Column("set-up"), Column("TTFT", "ms")],
            rows=[["one", 1234.5], ["two", None]],
        )
    ],
    figures=[
        Figure(name="curves", caption="Curves", panels=[CURVES, CURVES]),
        Figure(name="tails", caption="Tails", panels=[TAILS], key=True),
        Figure(name="bars", caption="Bars", panels=[STACKED]),
    ],
    notes=["a note"],
)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert load_result(save_result(tmp_path / "new", RESULT)) == RESULT


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schema": "kvxfer.pd-experiment/2"}, "schema"),
        ({"findings": [{"text": "x", "how": "guessed"}]}, "findings"),
        ({"name": 3}, "name"),
        ({"tables": [{"title": "t", "columns": [{"name": "a"}], "rows": [[1, 2]]}]}, "2 cells"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = tmp_path / "experiment.json"
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(RESULT) | change))
    with pytest.raises(InvalidUsage, match=told):
        load_result(path)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Curve("x", [1.0], []), "1 x and 0 y"),
        (lambda: Curves(title="t", x=Axis("x"), y=Axis("y"), series=[]), "0 lines"),
        (
            lambda: Curves(title="t", x=Axis("x"), y=Axis("y"), series=[Curve("x", [], [])]),
            "no point",
        ),
        (
            lambda: Curves(title="t", x=Axis("x"), y=Axis("y"), series=LINES * MAX_SERIES),
            "12 lines",
        ),
        (lambda: Distributions(title="t", axis="x", series=[Samples("x", [])]), "no point"),
        (lambda: Bars(title="t", axis="x", parts=["a"], bars=[Bar("x", [1.0, 2.0])]), "2 values"),
        (lambda: Bars(title="t", axis="x", parts=[], bars=[]), "0 parts"),
        (lambda: Figure(name="x", caption="x", panels=[CURVES, TAILS]), "one kind"),
        (lambda: Figure(name="x", caption="x", panels=[]), "one kind"),
        (lambda: Figure(name="../x", caption="x", panels=[CURVES]), "file's name"),
        (lambda: Table(title="t", columns=[Column("a")], rows=[[1.0, 2.0]]), "2 cells"),
    ],
)
def test_parts_that_do_not_fit_are_refused(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_a_distribution_is_thinned_by_rank_and_keeps_its_ends() -> None:
    values_ms = np.sort(np.random.default_rng(1).exponential(10.0, 100_000))
    kept = Samples.of("x", Distribution.of(values_ms), "measured").values_ms
    assert len(kept) == MAX_SAMPLES
    assert kept[0] == pytest.approx(values_ms[0], abs=1e-4)
    assert kept[-1] == pytest.approx(values_ms[-1], abs=1e-4)
    for percent in (50, 99, 99.9):
        assert np.percentile(kept, percent) == pytest.approx(
            np.percentile(values_ms, percent), rel=0.02
        )
    few = Samples.of("x", Distribution.of(values_ms[:10]), "measured").values_ms
    assert few == pytest.approx(values_ms[:10], abs=1e-4)


def test_text_has_every_figure_and_how_it_was_got() -> None:
    out = io.StringIO()
    print_experiment(RESULT, Console(file=out, width=60))
    text = out.getvalue()
    for wanted in ("two is later [simulated]", "1,230", "TTFT, ms", "two: simulated", "a note",
                   "Times (measured before, from records)"):  # fmt: skip
        assert wanted in text


def test_faults_stand_in_text_and_page() -> None:
    faulty = msgspec.structs.replace(RESULT, faults=["one: it ended"])
    out = io.StringIO()
    print_experiment(faulty, Console(file=out))
    assert "FAULT: one: it ended" in out.getvalue()
    assert "one: it ended" in experiment_page(faulty, [])


def test_the_page_needs_nothing_beside_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = write_report(RESULT, tmp_path).read_text()
    assert page.count("<svg") == 3
    assert HOSTILE not in page
    assert "&lt;script&gt;" in page
    for outside in ("http://", "https://", "src=", "<link"):
        assert outside not in page
    for name in ("curves", "tails", "bars"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_simulated_is_dashed_and_numbers_get_shades() -> None:
    pytest.importorskip("matplotlib")
    axes = draw_figure(RESULT.figures[0]).figure.axes
    styles = {line.get_linestyle() for line in axes[0].get_lines()[:2]}
    assert styles == {"-", "--"}
    assert [text.get_text() for text in axes[0].texts] == ["SLO", "two", "one"]
    light, dark = (line.get_color() for line in draw_figure(RESULT.figures[1]).figure.axes[0].lines)
    assert light != dark


def test_lone_points_have_labels_and_a_key_without_lines() -> None:
    pytest.importorskip("matplotlib")
    lone = [Curve("two", [4.0], [7.0], "simulated"), Curve("four", [8.0], [7.0], "simulated")]
    line = Curve("one", [1.0, 4.0], [4.5, 16.0], "simulated")
    panel = Curves(title="t", x=Axis("x", "log"), y=Axis("y", "log"), series=[line, *lone])
    sheet = draw_figure(Figure(name="f", caption="c", panels=[panel], key=True)).figure
    (axes,) = sheet.axes
    assert [text.get_text() for text in axes.texts] == ["two", "four"]
    heights = [text.xyann[1] for text in axes.texts]
    assert heights[1] - heights[0] >= 0.07
    sizes = {one.get_markersize() for one in axes.get_lines()}
    assert len(sizes) == 3  # of points that coincide the one behind is the larger
    (key,) = sheet.legends
    styles = [handle.get_linestyle() for handle in key.get_lines()]
    assert styles == ["--", "None", "None"]
    assert {handle.get_marker() for handle in key.get_lines()} == {"o"}
    assert len(axes.get_yticks()) >= 4


def test_places_that_were_measured_are_not_rounded() -> None:
    pytest.importorskip("matplotlib")
    places = Axis("tokens", "linear", [0.0, 1024.0, 8192.0])
    panel = Curves(title="t", x=places, y=Axis("ms"), series=[Curve("one", [0, 8192], [1, 2])])
    (axes,) = draw_figure(Figure(name="f", caption="c", panels=[panel])).figure.axes
    assert [one.get_text() for one in axes.get_xticklabels()] == ["0", "1,024", "8,192"]


def test_a_bar_says_its_parts_and_its_sum() -> None:
    pytest.importorskip("matplotlib")
    (axes,) = draw_figure(RESULT.figures[2]).figure.axes
    assert [text.get_text() for text in axes.texts] == ["1", "3", "4"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["full hit (computed)"]
