"""Records of PD benchmarks: what is written is read again, and nothing else is."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxfer.errors import InvalidUsage
from kvxfer.pd.result import (
    MAX_RECORD_BYTES,
    PDPoint,
    PDSetup,
    bench_path,
    find_points,
    find_setups,
    is_measured,
    load_point,
    load_setup,
    save_point,
    save_setup,
)
from kvxfer.pd.vllm_json import load_bench

SETUP = PDSetup(
    name="pd-tp1",
    kind="pd",
    connector="kvxfer",
    model="llama-3.1-8b",
    num_prefill=2,
    num_decode=3,
    prefill_tp=2,
    decode_tp=4,
    environment={"gpu": "none"},
)
AT_A_RATE = PDPoint(
    concurrency=64, num_prompts=30, isl=8, osl=2, request_rate=0.5, burstiness=0.25, trace="a_b"
)
POINT = PDPoint(concurrency=4, num_prompts=40, isl=8192, osl=1024, notes=["one"])
REPLIES: dict[str, Any] = {
    "duration": 2.0,
    "completed": 2,
    "ttfts": [0.1, 0.2],
    "itls": [[0.01, 0.02], []],
    "input_lens": [8, 8],
    "output_lens": [3, 1],
    "errors": ["", ""],
}


def test_records_are_read_as_written(tmp_path: Path) -> None:
    folder = tmp_path / "pd-tp1"
    save_setup(folder, SETUP)
    path = save_point(folder, POINT)
    assert load_setup(folder) == SETUP
    assert load_point(path) == POINT
    assert path.name == "c4-i8192-o1024.point.json"
    assert {one.name for one in folder.iterdir()} == {"setup.json", path.name}  # no draft stays
    assert json.loads((folder / "setup.json").read_text())["schema"] == "kvxfer.pd-setup/1"


def test_devices_are_those_of_all_engines() -> None:
    assert SETUP.num_devices == 2 * 2 + 3 * 4


def test_a_field_of_a_later_version_is_passed_over(tmp_path: Path) -> None:
    path = save_point(tmp_path, POINT)
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": 1}))
    assert load_point(path) == POINT


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"schema": "kvxfer.pd-setup/2"}, "schema"),
        ({"kind": "other"}, "kind"),
        ({"connector": "other"}, "connector"),
        ({"num_prefill": -1}, "num_prefill"),
        ({"prefill_tp": 0}, "prefill_tp"),
        ({"name": "../up"}, "../up"),
        ({"model": None}, "model"),
    ],
)
def test_a_setup_that_is_none_is_refused(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = save_setup(tmp_path, SETUP)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(InvalidUsage, match=r"setup\.json.*" + named.replace(".", r"\.")):
        load_setup(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b" " * 20])
def test_what_is_no_record_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "setup.json").write_bytes(content)
    with pytest.raises(InvalidUsage, match="not a record"):
        load_setup(tmp_path)


def test_a_file_without_end_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "setup.json").open("wb") as file:
        file.truncate(MAX_RECORD_BYTES + 1)
    with pytest.raises(InvalidUsage, match=f"larger than {MAX_RECORD_BYTES} bytes"):
        load_setup(tmp_path)


def test_a_point_under_another_ones_name_is_refused(tmp_path: Path) -> None:
    path = save_point(tmp_path, POINT)
    with pytest.raises(InvalidUsage, match="c4-i8192-o1024"):
        load_point(path.rename(tmp_path / "c8-i8192-o1024.point.json"))


def test_a_point_is_measured_once_it_is_whole(tmp_path: Path) -> None:
    assert not is_measured(tmp_path, POINT)
    bench_path(tmp_path, POINT).write_text("{}")
    assert not is_measured(tmp_path, POINT)
    save_point(tmp_path, POINT)
    assert is_measured(tmp_path, POINT)
    fewer = PDPoint(concurrency=4, num_prompts=16, isl=8192, osl=1024)
    assert not is_measured(tmp_path, fewer)
    bench_path(tmp_path, POINT).unlink()
    assert not is_measured(tmp_path, POINT)


def test_points_that_were_cut_off_are_found(tmp_path: Path) -> None:
    save_setup(tmp_path, SETUP)
    whole = save_point(tmp_path, POINT)
    bench_path(tmp_path, POINT).write_text("{}")
    half = tmp_path / "c8-i8192-o1024.json"
    half.write_text("{}")
    assert find_points(tmp_path) == ([whole], [half])


def test_a_folder_without_setups_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match="kvxfer pd bench"):
        find_setups(tmp_path)
    save_setup(tmp_path / "b", SETUP)
    save_setup(tmp_path / "a", SETUP)
    assert [path.name for path in find_setups(tmp_path)] == ["a", "b"]


def test_the_clients_result_is_read(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**REPLIES, "backend": "openai-chat", "mean_itl_ms": float("nan")}))
    result = load_bench(path)
    assert result.itls == REPLIES["itls"]
    assert (result.num_requests, result.is_chat, result.latencies) == (2, True, None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"itls": None}, "itls"),
        ({"itls": [[0.1]]}, "itls"),
        ({"errors": [""] * 3}, "errors"),
        ({"latencies": [1.0]}, "latencies"),
        ({"start_times": [1.0, float("nan")]}, "start time"),
        ({"itls": [[-0.1], []]}, "-0.1 s"),
        ({"ttfts": [0.1, float("inf")]}, "inf s"),
        ({"itls": [[float("nan")], []]}, "nan s"),
        ({"duration": 0.0}, "duration"),
        ({"output_lens": [3, -1]}, "output_lens"),
        ({"output_lens": [3, 1 << 50]}, "output_lens"),
    ],
)
def test_a_result_that_cannot_be_is_refused(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**REPLIES, **changes}))
    with pytest.raises(InvalidUsage, match=r"--save-detailed.*" + named):
        load_bench(path)


def test_a_result_without_details_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"duration": 1.0, "completed": 2}))
    with pytest.raises(InvalidUsage, match="ttfts"):
        load_bench(path)


def test_a_point_at_a_rate_is_another_one(tmp_path: Path) -> None:
    save_setup(tmp_path, SETUP)
    path = save_point(tmp_path, AT_A_RATE)
    assert path.name == "c64-i8-o2-r0.5-b0.25-ta_b.point.json"
    assert load_point(path) == AT_A_RATE
    bench_path(tmp_path, AT_A_RATE).write_text("{}")
    assert is_measured(tmp_path, AT_A_RATE)
    assert not is_measured(tmp_path, msgspec.structs.replace(AT_A_RATE, request_rate=None))
    path.unlink()
    assert find_points(tmp_path) == ([], [bench_path(tmp_path, AT_A_RATE)])  # cut off


@pytest.mark.parametrize(
    "fields", [{"request_rate": 0.0}, {"burstiness": 1e6}, {"trace": "../x"}, {"trace": "x" * 41}]
)
def test_a_rate_or_trace_that_is_none_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    wrong = msgspec.to_builtins(AT_A_RATE) | fields
    path = tmp_path / "x.point.json"
    path.write_text(json.dumps(wrong))
    with pytest.raises(InvalidUsage, match=next(iter(fields))):
        load_point(path)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match="nonexist is no folder"):
        find_setups(tmp_path / "nonexist")
    with pytest.raises(InvalidUsage, match="has no SETUP"):
        find_setups(tmp_path)
