"""``kvxfer pd experiment`` with several experiments: the real program, a fake vLLM, its client."""

from pathlib import Path

import pytest
from pd_programs import Fake

from kvxfer.pd.experiment_result import load_result

ASKED = ("agg-vs-pd", "goodput")
SETUP = ("--setup", "one=aggregated", "--isl", "16", "--osl", "4", "--prompts-per-concurrency", "8")
LOAD = (*SETUP, "--concurrency", "1,2")


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def num_started(fake: Fake) -> int:
    """Processes of engines: each has a worker."""
    return len(list(fake.pids.iterdir()))


def points(out: Path, name: str) -> list[str]:
    return sorted(path.name for path in (out / name / "run" / "one").glob("*.point.json"))


def test_a_set_up_that_two_experiments_share_is_started_once(fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = fake.run("experiment", *ASKED, *LOAD, "--out", str(out))
    assert done.returncode in (0, 1), done.stderr  # a fake's gaps may be found at fault
    assert num_started(fake) == 2
    assert fake.running() == []
    for name in ASKED:
        assert points(out, name) == ["c1-i16-o4.point.json", "c2-i16-o4.point.json"]
        sources = load_result(out / name / "experiment.json").sources
        assert {(one.what.partition(",")[0], one.how) for one in sources} == {("one", "measured")}
    assert done.stdout.count("one c2-i16-o4:") == 2


def test_what_is_there_is_not_measured_again(fake: Fake, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "out"))
    fake.run("experiment", ASKED[0], *LOAD, *out)
    assert num_started(fake) == 2
    fake.run("experiment", *ASKED, *LOAD, *out)  # one of them lacks something: it starts alone
    assert num_started(fake) == 4
    fake.run("experiment", *ASKED, *LOAD, *out)
    assert num_started(fake) == 4


def test_a_set_up_that_does_not_start_is_a_failure_of_each(fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "out"
    setups = (*LOAD, "--setup", "bad=pd", "--decode-args=--fake=crash")
    done = fake.run("experiment", *ASKED, *setups, "--out", str(out))
    assert done.returncode == 1
    assert fake.running() == []
    for name in ASKED:
        assert points(out, name) == ["c1-i16-o4.point.json", "c2-i16-o4.point.json"]
        (fault,) = [
            text for text in load_result(out / name / "experiment.json").faults if "bad" in text
        ]
        assert "decode0 ended with status 1" in fault
