"""Transfers of a plan: what sweeps say, what lies outside them, and how links are shared."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_models import KV, sweep_row, transfer_model

from kvxfer.errors import InvalidUsage
from kvxfer.layout.models import load_model
from kvxfer.pd.planner import KVSize, TransferModel, load_transfer
from kvxfer.pd.planner.contention import SentRecord, load_contention
from kvxfer.pd.planner.simulation.clock import Clock
from kvxfer.pd.planner.simulation.links import Links
from kvxfer.sweep.result import ComputeEffect, Latency, SweepReport, SweepResult
from kvxfer.worker import SendResult

MIB, GIB = 1 << 20, 1 << 30


def model(*rows: SweepResult, **changes) -> TransferModel:
    return TransferModel("a test", rows, **changes)


def test_times_lie_between_those_measured() -> None:
    curve = model(sweep_row(MIB, 10.0), sweep_row(GIB, 100.0)).curve(run_bytes=32_768)
    assert curve.alone_s(MIB) == pytest.approx(MIB / 10e9)
    assert curve.alone_s(GIB) == pytest.approx(GIB / 100e9)
    middle = (curve.alone_s(MIB) + curve.alone_s(GIB)) / 2
    assert curve.alone_s((MIB + GIB) / 2) == pytest.approx(middle)
    assert curve.reasons == ()


def test_beyond_the_sizes_the_last_rate_or_the_least_time_holds_and_is_not_covered() -> None:
    curve = model(sweep_row(MIB, 10.0), sweep_row(GIB, 100.0)).curve(run_bytes=32_768)
    assert curve.alone_s(2 * GIB) == pytest.approx(2 * GIB / 100e9)
    assert curve.alone_s(MIB / 2) == pytest.approx(MIB / 10e9)
    assert [curve.covers(size) for size in (MIB - 1, MIB, GIB, GIB + 1)] == [0, 1, 1, 0]


def test_rates_lie_between_those_of_neighbouring_runs() -> None:
    rows = [sweep_row(run_bytes=4096, gb_per_s=10.0), sweep_row(run_bytes=65536, gb_per_s=40.0)]
    found = {size: model(*rows).curve(run_bytes=size) for size in (4096, 16384, 65536)}
    assert found[4096].alone_s(GIB) == pytest.approx(GIB / 10e9)
    assert found[16384].alone_s(GIB) == pytest.approx(GIB / 20e9)  # half way in the logarithm
    assert found[65536].alone_s(GIB) == pytest.approx(GIB / 40e9)


def test_runs_that_were_not_measured_are_said_or_refused() -> None:
    curve = model(sweep_row()).curve(run_bytes=1024)
    assert curve.reasons == ("runs of 1 KiB taken as 32 KiB; measured: 32 KiB to 32 KiB",)
    with pytest.raises(InvalidUsage, match="runs of 1 KiB"):
        model(sweep_row(), strict=True).curve(run_bytes=1024)


def test_ranks_have_their_own_rows() -> None:
    rows = sweep_row(gb_per_s=100.0), sweep_row(gb_per_s=150.0, src_tp=2, dst_tp=2)
    both = model(*rows)
    own = both.curve(run_bytes=32_768, src_tp=2, dst_tp=2)
    assert own.alone_s(GIB) == pytest.approx(GIB / 150e9)
    guessed = both.curve(run_bytes=32_768, src_tp=2, dst_tp=4)
    assert guessed.alone_s(GIB) == pytest.approx(GIB / 100e9)
    assert guessed.reasons == ("transfers of TP 2:4 taken as 1:1; measured: 1:1, 2:2",)
    with pytest.raises(InvalidUsage, match="no transfer of TP 1:2 among 2:2"):
        model(rows[1]).curve(run_bytes=32_768, dst_tp=2)


def test_more_transfers_share_what_was_measured_of_them_together() -> None:
    shared = model(sweep_row(), contention=((1, 1.0), (4, 1.3)))
    assert [shared.share(count) for count in (1, 4, 8)] == [1.0, 1.3 / 4, 1.3 / 8]
    assert shared.share(2) == pytest.approx(1.1 / 2)
    assert [shared.covers(count) for count in (4, 5)] == [True, False]
    assert model(sweep_row()).share(3) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"contention": ((2, 1.0), (2, 1.1))},
        {"contention": ((2, 0.0),)},
        {"control_s": -1.0},
        {"control_s": float("nan")},
    ],
)
def test_a_model_out_of_bounds_is_refused(changes: dict) -> None:
    with pytest.raises(InvalidUsage):
        model(sweep_row(), **changes)
    with pytest.raises(InvalidUsage, match="no transfer to go by"):
        model()


def save(folder: Path, *rows: SweepResult, schema: str = "kvxfer.sweep/1") -> Path:
    path = folder / "sweep.json"
    path.write_bytes(
        msgspec.json.encode(SweepReport(schema=schema, environment={}, results=[*rows]))
    )
    return path


def test_a_record_gives_the_rows_that_count(tmp_path: Path) -> None:
    good = sweep_row()
    others = (
        sweep_row(op="get"),
        sweep_row(verified=False),
        sweep_row(peer="nixl"),
        sweep_row(convert="bfloat16 to fp8_e4m3"),
        sweep_row(sm_count=132),
        sweep_row(compute=ComputeEffect("gemm", "src", 1.0, 1.0)),
    )
    found = load_transfer([save(tmp_path, good, *others)])
    assert found.rows == (good,)
    assert load_transfer([save(tmp_path, good, *others)], sm_count=132).rows[0].sm_count == 132


def test_records_that_cannot_serve_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match="no verified put at all"):
        load_transfer([save(tmp_path, sweep_row(verified=False))])
    two = save(tmp_path, sweep_row(), sweep_row(transport="shm"))
    with pytest.raises(InvalidUsage, match="nvlink, shm; name one"):
        load_transfer([two])
    assert load_transfer([two], only={"transport": "shm"}).rows[0].transport == "shm"
    with pytest.raises(InvalidUsage, match="no verified put of ucx"):
        load_transfer([two], only={"transport": "ucx"})
    with pytest.raises(InvalidUsage, match="no row with 3 SMs"):
        load_transfer([two], only={"transport": "shm"}, sm_count=3)
    with pytest.raises(InvalidUsage, match="has the schema"):
        load_transfer([save(tmp_path, sweep_row(), schema="kvxfer.sweep/9")])
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(InvalidUsage, match="not a record of a sweep"):
        load_transfer([tmp_path / "sweep.json"])


@pytest.mark.parametrize(
    ("field", "other", "words"),
    [
        ("memory", "private", "device, private memory"),
        ("block_order", "contiguous", "contiguous, shuffled blocks"),
        ("order", "hnd", "hnd, nhd pages"),
    ],
)
def test_rows_that_are_not_alike_are_not_mixed(
    tmp_path: Path, field: str, other: str, words: str
) -> None:
    slow = sweep_row(gb_per_s=1.0, **{field: other})
    path = save(tmp_path, sweep_row(), slow)
    option = field.replace("_", "-")
    with pytest.raises(InvalidUsage, match=f"rows of {words}; name one \\(--{option}\\)"):
        load_transfer([path])
    assert load_transfer([path], only={field: other}).rows == (slow,)
    with pytest.raises(InvalidUsage, match="no verified put of none"):
        load_transfer([path], only={field: "none"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total_bytes": 0}, "row 2 .nvlink, device memory.: total_bytes is 0"),
        ({"total_bytes": -5}, "total_bytes is -5"),
        ({"run_bytes": 0}, "run_bytes is 0"),
        ({"latency_us": Latency(0.0, 0.0, 0.0)}, "latency_us.p50 is 0.0"),
    ],
)
def test_rows_that_no_transfer_has_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    row = msgspec.structs.replace(sweep_row(), **changes)
    with pytest.raises(InvalidUsage, match=message):
        load_transfer([save(tmp_path, sweep_row(), row)])


def test_the_records_of_this_project_are_read() -> None:
    results = Path(__file__).resolve().parents[2] / "bench" / "results"
    found = load_transfer([results / "2026-11-29-h200x2-models.json"])
    curve = found.curve(run_bytes=32_768)
    assert curve.sizes_bytes == (64 * MIB, 160 * MIB, GIB, 2560 * MIB)
    assert 3.0e-3 < curve.alone_s(GIB) < 3.1e-3


def test_runs_are_pages_or_heads_of_a_token() -> None:
    assert KVSize.of(load_model("llama-3.1-8b")).bytes_per_token == KV.bytes_per_token
    # as the sweeps of ranks measured them
    pairs = [(1, 1), (2, 2), (2, 1), (1, 2), (4, 2), (16, 16)]
    assert [KV.run_bytes(*pair) for pair in pairs] == [32_768, 16_384, 1024, 1024, 512, 4096]
    assert KV.request_bytes(17) == 32 * KV.bytes_per_token


def finish_times(
    flows: list[tuple[float, float, tuple[str, ...]]], contention: float = 1.0
) -> list[float]:
    """When transfers of (start, seconds alone, ends) are over."""
    clock, ends = Clock(), [float("nan")] * len(flows)
    links = Links(clock, transfer_model(contention=((2, contention),)).share)
    for at, (start_s, work_s, places) in enumerate(flows):

        def over(at: int = at) -> None:
            ends[at] = clock.now_s

        clock.at(start_s, links.start, work_s, places, over)
    clock.run()
    return ends


def test_a_transfer_alone_takes_its_time() -> None:
    assert finish_times([(1.0, 2.0, ("a", "b"))]) == [3.0]
    assert finish_times([(1.0, 0.0, ("a", "b"))]) == [1.0]


def test_two_transfers_share_a_link_and_the_rest_goes_fast() -> None:
    # both at half rate until 3.0, when the first has its 1.0; the second then has 1.0 left
    assert finish_times([(1.0, 1.0, ("a", "b")), (1.0, 2.0, ("a", "c"))]) == [3.0, 4.0]
    assert finish_times([(0.0, 1.0, ("a", "b")), (0.0, 1.0, ("c", "d"))]) == [1.0, 1.0]
    assert finish_times([(0.0, 1.0, ("a",)), (0.0, 1.0, ("a",))], 1.25) == [1.6, 1.6]


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.floats(0.01, 5), st.integers(0, 2), st.integers(0, 2)),
        min_size=1,
        max_size=12,
    )
)
def test_links_carry_no_more_than_they_can(
    flows: list[tuple[float, float, int, int]],
) -> None:
    placed = [(start, work, (f"out{out}", f"in{into}")) for start, work, out, into in flows]
    ends = finish_times(placed)
    for (start_s, work_s, _), end_s in zip(placed, ends, strict=True):
        assert end_s >= start_s + work_s - 1e-9
    for end in {place for _, _, places in placed for place in places}:
        there = [at for at, (_, _, places) in enumerate(placed) if end in places]
        busy_s = max(ends[at] for at in there) - min(placed[at][0] for at in there)
        assert busy_s >= sum(placed[at][1] for at in there) - 1e-9


def sent(folder: Path, at_once: int, rate: float, **changes: object) -> Path:
    fields = {
        "concurrency": at_once,
        "request_bytes": MIB,
        "gb_per_s": rate,
        "actual_path": "nvlink",
        "checked": True,
    }
    path = folder / f"{at_once}-{rate}.json"
    path.write_bytes(msgspec.json.encode(fields | changes))
    return path


def test_contention_is_what_requests_reach_together(tmp_path: Path) -> None:
    rates = [(4, 15.0), (1, 10.0), (1, 12.0), (1, 11.0), (2, 13.2)]
    found = load_contention([sent(tmp_path, *rate) for rate in rates])
    assert found == ((1, 1.0), (2, pytest.approx(1.2)), (4, pytest.approx(15 / 11)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checked": False}, "not checked"),
        ({"request_bytes": 5}, "different transfers"),
        ({"actual_path": "tcp"}, "different transfers"),
        ({"concurrency": 0}, "not what"),
        ({"gb_per_s": 0.0}, "not what"),
    ],
)
def test_records_that_say_nothing_of_contention_are_refused(
    tmp_path: Path, changes: dict, message: str
) -> None:
    with pytest.raises(InvalidUsage, match=message):
        load_contention([sent(tmp_path, 1, 10.0), sent(tmp_path, 2, 10.0, **changes)])
    with pytest.raises(InvalidUsage, match="one request at a time"):
        load_contention([sent(tmp_path, 2, 10.0)])


def test_a_sender_writes_what_contention_reads() -> None:
    fields = {field.name for field in dataclasses.fields(SendResult)}
    assert fields >= set(SentRecord.__struct_fields__)
