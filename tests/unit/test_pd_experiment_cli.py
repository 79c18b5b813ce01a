"""``kvxfer pd experiment`` where nothing has to be measured."""

import re
from pathlib import Path

import msgspec
import pytest
from planner_models import sweep_row

from kvxfer.cli.main import main
from kvxfer.pd.experiment_result import RESULT_FILE, load_result
from kvxfer.sweep.result import SCHEMA, SweepReport


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep with rows of two transports, one ten times as fast as the other."""
    return save(tmp_path / "two.json", nvlink=100.0, shm=10.0)


def save(path: Path, **gb_per_s: float) -> Path:
    """A sweep with rows of these transports."""
    rows = [
        sweep_row(size, rate, transport=transport)
        for size in (1 << 20, 1 << 32)
        for transport, rate in gb_per_s.items()
    ]
    path.write_bytes(msgspec.json.encode(SweepReport(schema=SCHEMA, environment={}, results=rows)))
    return path


def conduct(*words: str) -> int:
    return main(("pd", "experiment", *words))


def test_one_transport_of_a_sweep_is_named(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("kv-size", "--sweep", str(sweep), "--out", str(tmp_path / "out"))
    assert conduct(*words) == 2
    assert "rows of nvlink, shm; name one" in capsys.readouterr().err
    assert conduct(*words, "--transport", "shm") == 0
    assert "over shm, two: 107 ms for one request" in " ".join(capsys.readouterr().out.split())
    assert conduct(*words, "--transport", "shm", "--memory", "private") == 2
    assert "of private memory; it has device" in capsys.readouterr().err


def test_of_two_sweeps_the_one_with_several_transports_takes_what_is_named(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save(tmp_path / "other.json", ucx=1.0)
    words = ("kv-size", "--sweep", str(sweep), str(other), "--out", str(tmp_path / "out"))
    assert conduct(*words, "--transport", "shm") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "over shm, two: 107 ms for one request" in text
    assert "over ucx, other: 1,070 ms for one request" in text
    alone = ("kv-size", "--sweep", str(other), "--out", str(tmp_path / "out"))
    assert conduct(*alone, "--transport", "shm") == 2
    assert "it has ucx" in capsys.readouterr().err


def test_a_simulation_takes_the_transport_too(sweep: Path, tmp_path: Path) -> None:
    load = ("--isl", "8192", "--osl", "8", "--concurrency", "1", "--prompts-per-concurrency", "2")
    words = ("--simulate", "--size", "gpu", *load, "--sweep", str(sweep))
    ttft_ms = []
    for transport in ("nvlink", "shm"):
        out = tmp_path / transport
        setup = ("--setup", "pd=pd,connector=nixl")  # sends whole prompts: their time shows
        names = ("agg-vs-pd", "goodput", "--out", str(out), "--transport", transport)
        assert conduct(*names, *words, *setup) == 0
        (row,) = load_result(out / "goodput" / RESULT_FILE).tables[0].rows
        ttft_ms.append(row[2])
    assert ttft_ms[1] > ttft_ms[0] + 20.0  # type: ignore[operator]


def test_a_result_of_another_command_is_not_replaced_unsaid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*words: str) -> str:
        command = ("kv-size", "--out", str(tmp_path), *words)
        monkeypatch.setattr("sys.argv", ["kvxfer", "pd", "experiment", *command])
        assert conduct(*command) == 0
        return capsys.readouterr().err

    assert told() == ""
    assert told() == ""  # the same command makes the same anew
    text = told("--isl", "1k")
    when = r"[0-9T:+-]+, kvxfer pd experiment kv-size --out \S+"
    assert re.fullmatch(rf"kv-size: replaces the result of {when}\n", text)
    (tmp_path / "kv-size" / RESULT_FILE).write_text("damaged")
    assert f"{RESULT_FILE}, which cannot be read" in told()


def test_rows_of_no_sweep_are_not_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert conduct("kv-size", "--memory", "private", "--out", str(tmp_path / "out")) == 2
    assert "--memory goes with --sweep" in capsys.readouterr().err
