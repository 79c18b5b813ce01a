"""What the experiment on reuse says of planted times, and what it does with records."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_reuse import reuse_setup

from kvxfer.cli.main import main
from kvxfer.errors import InvalidUsage, KvxferError, NotAvailable
from kvxfer.pd.experiment_result import Bars, Curves, ExperimentResult, load_result
from kvxfer.pd.experiments.context import Context
from kvxfer.pd.experiments.kv_reuse.parts import Parts
from kvxfer.pd.experiments.kv_reuse.record import Asked, ReuseRun, load_runs, save_run
from kvxfer.pd.experiments.options import Options
from kvxfer.pd.experiments.registry import find_experiment
from kvxfer.pd.launch.launcher import Launcher
from kvxfer.pd.launch.python_site import PythonSite
from kvxfer.pd.load.plan import LoadPlan
from kvxfer.pd.models import ServedModel
from kvxfer.pd.result import Reuse


def planted(reuse: Reuse, ttft_ms: dict[int, float], loading_ms: float = 0.0) -> ReuseRun:
    """A set-up whose prompts take so long, of which so much is a transfer where there are hits."""
    asked = []
    for hit, whole_ms in ttft_ms.items():
        load_s = loading_ms / 1e3 if hit else 0.0
        parts = Parts(
            arrival_s=0.002,
            lookup_s=0.001,
            placement_s=0.0,
            transfer_s=load_s,
            waiting_s=0.0,
            first_step_s=whole_ms / 1e3 - 0.003 - load_s,
        )
        from_store = reuse == "mooncake"
        hits = 0 if reuse == "none" else min(hit, 8191)
        one = Asked(
            hit_tokens=hit,
            index=0,
            ttft_s=whole_ms / 1e3,
            text="w1",
            cached_tokens=0 if from_store else hits,
            loaded_tokens=hits if from_store else 0,
            parts=parts if from_store else None,
        )
        asked += [one, msgspec.structs.replace(one, index=1)]
    token_bytes = 131072 if reuse == "mooncake" else 0
    return ReuseRun(setup=reuse_setup(reuse), isl=8192, osl=4, token_bytes=token_bytes, asked=asked)


PLANTED = (
    planted("none", {0: 350.0, 1024: 350.0, 8192: 350.0}),
    planted("vllm", {0: 350.0, 1024: 310.0, 8192: 20.0}),
    planted("mooncake", {0: 360.0, 1024: 400.0, 8192: 200.0}, loading_ms=50.0),
)


def conduct(out: Path, *records: Path, **changes: Any) -> ExperimentResult:
    def no_launcher() -> Launcher:
        raise NotAvailable("a test does not measure")

    context = Context(
        out=out,
        size="gpu",
        options=find_experiment("kv-reuse").sizes["quick"],
        command=("kvxfer", "pd", "experiment", "kv-reuse"),
        make_launcher=no_launcher,
        records=records,
        **changes,
    )
    return find_experiment("kv-reuse").run(context)


@pytest.fixture
def records(tmp_path: Path) -> Path:
    for run in PLANTED:
        save_run(tmp_path / "run" / run.setup.name, run)
    return tmp_path / "run"


def test_planted_times_have_the_planted_answer(records: Path, tmp_path: Path) -> None:
    found = conduct(tmp_path / "out", records)
    said = "\n".join(one.text for one in found.findings)
    assert "mooncake, 8k of 8k tokens there: TTFT P50 200 ms against 350 ms without" in said
    assert "1.75 times less" in said
    assert "mooncake: reuse beats computing anew from a hit of 8k tokens on" in said
    assert "vllm: reuse beats computing anew from a hit of 1k tokens on" in said
    assert "mooncake: with nothing there, TTFT P50 is +10 ms against none" in said
    assert "loading KV is 26% of TTFT: lookup 1 ms, placement 0 ms, transfer 50 ms" in said
    assert "the largest part of loading is transfer, 98% of it" in said
    assert "mooncake: 1074 MB a prompt in the transfer, 21.5 GB/s" in said
    assert {one.how for one in found.findings} == {"recorded"}
    assert found.faults == []
    (table,) = found.tables
    assert [row[0] for row in table.rows] == ["mooncake"] * 3 + ["none"] * 3 + ["vllm"] * 3
    ttft, parts = found.figures
    assert isinstance(ttft.panels[0], Curves)
    assert {curve.label for curve in ttft.panels[0].series} == {"none", "vllm", "mooncake"}
    (bars,) = parts.panels
    assert isinstance(bars, Bars)
    assert [sum(bar.values) for bar in bars.bars] == pytest.approx([360.0, 400.0, 200.0])


def test_a_store_that_never_pays_is_said_so(tmp_path: Path) -> None:
    runs = (PLANTED[0], planted("mooncake", {0: 350.0, 1024: 350.0, 8192: 349.0}, 1.0))
    for run in runs:
        save_run(tmp_path / "run" / run.setup.name, run)
    said = [one.text for one in conduct(tmp_path / "out", tmp_path / "run").findings]
    assert "mooncake: at no length of hit does reuse beat computing anew" in said


def test_a_store_alone_has_nothing_to_compare_with(tmp_path: Path) -> None:
    save_run(tmp_path / "run" / "mooncake", PLANTED[2])
    said = [one.text for one in conduct(tmp_path / "out", tmp_path / "run").findings]
    assert "mooncake: nothing without reuse to compare with" in said


def test_it_is_not_simulated_and_needs_its_own_records(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match="leave --simulate out"):
        conduct(tmp_path, simulate_only=True)
    with pytest.raises(InvalidUsage, match=r"no reuse\.json"):
        conduct(tmp_path, tmp_path)
    with pytest.raises(InvalidUsage, match="nothing could be measured; none: a test does not"):
        conduct(tmp_path)


def test_the_command_reads_records_and_hits(records: Path, tmp_path: Path) -> None:
    words = ("--records", str(records), "--hits", "0,1k", "--out", str(tmp_path / "out"))
    assert main(("pd", "experiment", "kv-reuse", *words)) == 0
    found = load_result(tmp_path / "out" / "kv-reuse" / "experiment.json")
    assert len(found.tables[0].rows) == 9
    assert main(("pd", "experiment", "kv-reuse", *words[:3], "1x")) == 2


def held(out: Path, **changes: Any) -> ExperimentResult:
    """An experiment whose folder holds all of one set-up; nothing can be started."""
    site = PythonSite("/no/python", is_cpu=True, has_flashinfer=False, versions={})
    launcher = Launcher(site=site, model=ServedModel("tiny", str(out)), logs=out)
    options = Options(
        setups=("none=aggregated,reuse=none",),
        load=LoadPlan(isl=(8192,), osl=(4,), prompts_per_concurrency=2),
        hits=(0, 1024, 8192),
    )
    run = msgspec.structs.replace(PLANTED[0], **changes)
    save_run(out / "run" / "none", run)
    context = Context(
        out=out, size="cpu", options=options, command=("kvxfer",), make_launcher=lambda: launcher
    )
    return find_experiment("kv-reuse").run(context)


def test_what_a_folder_holds_is_not_measured_again(tmp_path: Path) -> None:
    found = held(tmp_path)
    assert (found.faults, len(found.tables[0].rows)) == ([], 3)
    with pytest.raises(InvalidUsage, match="holds a set-up with reuse 'vllm'"):
        held(tmp_path, setup=reuse_setup("vllm", name="none"))
    with pytest.raises(KvxferError):  # other prompts are to be measured, and nothing starts
        held(tmp_path, osl=5)


def test_a_record_that_is_none_is_refused(records: Path) -> None:
    assert [run.setup.name for run in load_runs(records)] == ["mooncake", "none", "vllm"]
    (records / "none" / "reuse.json").write_text("{}")
    with pytest.raises(InvalidUsage, match="not a record of kv-reuse"):
        load_runs(records)


@pytest.mark.parametrize(
    ("setups", "text"),
    [
        (("x=external,url=http://127.0.0.1:1",), "starts aggregated engines"),
        (("x=aggregated", "y=pd"), "y: kv-reuse starts aggregated"),
        (("x=aggregated", "x=aggregated,reuse=none"), "a name of its own"),
    ],
)
def test_set_ups_that_it_does_not_start_are_refused(
    setups: tuple[str, ...], text: str, tmp_path: Path
) -> None:
    context = Context(
        out=tmp_path,
        size="cpu",
        options=Options(setups=setups, load=LoadPlan(isl=(1024,), osl=(4,)), hits=(0,)),
        command=("kvxfer",),
        make_launcher=lambda: pytest.fail("nothing is to be started"),
    )
    with pytest.raises(InvalidUsage, match=text):
        find_experiment("kv-reuse").run(context)
