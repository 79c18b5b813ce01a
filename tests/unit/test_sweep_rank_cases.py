"""The rows of a sweep of ranks, the copies of its limit, and what the hardware allows them."""

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_teams import team_of

from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.layout import KVLayout
from kvxfer.sweep import RankSweepRun, SweepOptions
from kvxfer.sweep import paths as paths_module
from kvxfer.sweep.cases import LayoutChoice, RankOptions, expand_cases
from kvxfer.sweep.messages import PeerPlan
from kvxfer.sweep.ranks.cases import RankCase, expand_rank_cases
from kvxfer.sweep.ranks.limit import limit_copies, physical_limit

HND = LayoutChoice("hnd", lambda layout: replace(layout, order="hnd"))
FP8 = LayoutChoice("fp8", lambda layout: replace(layout, dtype="fp8"), as_source=False)
USUAL = LayoutChoice("usual", lambda layout: layout)
OPTIONS = SweepOptions(tokens=(100,), memory=("shared",), ranks=RankOptions())


def cases_of(options: SweepOptions = OPTIONS, **ranks: object) -> list[RankCase]:
    return expand_rank_cases(replace(options, ranks=RankOptions(**ranks)), transport="shm")


def test_pairs_of_sizes_and_heads_are_swept() -> None:
    cases = cases_of(tp=((1, 1), (6, 4)), pp=((1, 1), (2, 1)), kv_heads=(8, 2))
    assert [
        (case.src.layout.num_kv_heads, case.src.pp, case.src.tp, case.dst.tp) for case in cases
    ] == [(heads, pp, tp[0], tp[1]) for heads in (8, 2) for pp in (1, 2) for tp in ((1, 1), (6, 4))]
    six_four = cases[1]
    assert len(six_four.src.ranks) == 6
    assert six_four.src.num_blocks == 7  # of 16 tokens
    assert six_four.src.pool_blocks == 14
    assert "TP 6:4 llama-3.1-8b, 8 KV heads, 100 tokens, nhd split 16" in six_four.label
    assert "PP 2:1" in cases[2].label


def test_each_layout_meets_each_and_fp8_is_written_alone() -> None:
    cases = cases_of(layouts=(USUAL, HND, FP8))
    pairs = [
        (case.src.layout.order, case.dst.layout.order, case.dst.layout.dtype) for case in cases
    ]
    assert len(pairs) == 6
    assert {case.src.layout.dtype for case in cases} == {"bfloat16"}
    converting = [case for case in cases if case.convert]
    assert [case.dst.layout.dtype for case in converting] == ["fp8_e4m3"] * 2
    plain = next(case for case in cases if not case.convert)
    assert converting[0].total_bytes * 2 == plain.total_bytes
    assert "nhd split 16 -> hnd split 16" in cases[1].label


def test_equal_layouts_are_swept_once_and_unsuitable_ones_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(_: KVLayout) -> KVLayout:
        raise InvalidUsage("no such chunk")

    refused = LayoutChoice("chunk", refuse)
    assert len(cases_of(layouts=(USUAL, HND, USUAL, refused))) == 4
    assert "layout chunk left out: no such chunk" in caplog.text
    with pytest.raises(InvalidUsage, match="no layout of --layouts suits the model"):
        cases_of(layouts=(refused,))


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        (replace(OPTIONS, page_bytes=(4096,)), {}, "leave --page-bytes"),
        (replace(OPTIONS, compute=("gemm", "src")), {}, "--with-compute is of one pair"),
        (OPTIONS, {"pp": ((33, 1),)}, "pp_size is 33 for 32 layers"),
        (
            replace(OPTIONS, models=("deepseek-v3",)),
            {"kv_heads": (8,)},
            "MLA has one latent; leave it",
        ),
        (OPTIONS, {"kv_heads": (8, 33)}, "--kv-heads: 33; llama-3.1-8b has 32 attention heads, so"),
        (OPTIONS, {"tp": ((1, 1), (1, 33))}, r"--tp: 1:33; llama-3.1-8b has 32 .*use 1 \.\. 32"),
    ],
)
def test_what_cannot_be_swept_is_refused(
    options: SweepOptions, ranks: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidUsage, match=message):
        cases_of(options, **ranks)


def test_loopback_and_too_many_ranks_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.sweep.ranks.runner.RankTeam", lambda _: pytest.fail("started"))
    with pytest.raises(InvalidUsage, match="loopback is one process, and each rank is one"):
        RankSweepRun(replace(OPTIONS, transport="loopback"))
    ranks = RankOptions(tp=((128, 128),), pp=((2, 1),))
    many = replace(OPTIONS, transport="shm", models=("deepseek-v3",), ranks=ranks)
    with pytest.raises(InvalidUsage, match="384 ranks on both sides together; use at most 256"):
        RankSweepRun(many)


UNCHECKABLE = r"a head_dim of 7 in fp8_e4m3 is 7 bytes, which the sweep cannot check"


@pytest.fixture
def odd_model(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    shape = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    file.write_text(json.dumps({**shape, "head_dim": 7, "hidden_size": 28}))
    return str(file)


def test_a_layout_that_cannot_be_checked_is_refused_up_front(odd_model: str) -> None:
    options = replace(OPTIONS, models=(odd_model,))
    assert len(cases_of(options)) == 1  # of 14 bytes
    odd = replace(options, dtype="fp8")
    with pytest.raises(InvalidUsage, match=UNCHECKABLE):
        cases_of(odd)
    with pytest.raises(InvalidUsage, match=UNCHECKABLE):
        expand_cases(odd, transport="shm")


def test_in_a_matrix_it_is_a_cell_without_a_figure(
    odd_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvxfer.sweep.ranks.runner.RankTeam", lambda size: team_of(size))
    layouts = RankOptions(layouts=(USUAL, FP8))
    options = replace(
        OPTIONS, transport="shm", models=(odd_model,), ranks=layouts, iters=1, warmup=0
    )
    with RankSweepRun(options) as sweep:
        for case in sweep.cases:
            sweep.run_case(case)
    assert [row.dst_layout for row in sweep.report.results] == ["nhd split 16"]
    (skipped,) = sweep.report.skipped
    assert re.match(UNCHECKABLE, skipped.reason)
    assert (skipped.dst_layout, skipped.failed) == ("nhd split 16 fp8_e4m3", False)


# Contiguous copies.

MATRICES = st.lists(st.lists(st.integers(0, 300), min_size=3, max_size=3), min_size=1, max_size=4)


def plans_of(matrix: list[list[int]]) -> list[list[PeerPlan]]:
    """Plans of so many bytes from each copying rank to each of its peers."""
    return [
        [
            PeerPlan(peer=peer, num_bytes=num_bytes, num_pages=1, runs={num_bytes: 1})
            for peer, num_bytes in enumerate(row)
            if num_bytes
        ]
        for row in matrix
    ]


@given(MATRICES, st.booleans())
def test_limit_copies_move_what_each_pair_moves_and_never_overlap(
    matrix: list[list[int]], put: bool
) -> None:
    copies = limit_copies(plans_of(matrix), put=put)
    moved = {(copy.source, copy.destination): copy.num_bytes for copy in copies}
    assert moved == {
        (rank, peer) if put else (peer, rank): num_bytes
        for rank, row in enumerate(matrix)
        for peer, num_bytes in enumerate(row)
        if num_bytes
    }
    used = defaultdict(set)
    for copy in copies:
        for place, one in (
            (("src", copy.source), copy.source_range),
            (("dst", copy.destination), copy.destination_range),
        ):
            taken = set(range(one.offset_bytes, one.offset_bytes + one.num_bytes))
            assert not used[place] & taken
            used[place] |= taken
            assert one.offset_bytes % 64 == 0
            assert one.key == copy.source_range.key
    assert len({copy.source_range.key for copy in copies}) == len(copies)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([(0, 1)] * 4, 400.0),  # one wire for all
        ([(0, 2), (0, 3), (1, 2), (1, 3)], 800.0),  # two out, two in
        ([(0, 4), (1, 4), (2, 4), (3, 4)], 400.0),  # four out, one in
        ([(0, 1), (0, 2), (0, 3), (0, 4)], 400.0),  # one out
        ([(0, 0)] * 4, 400.0),
    ],
)
def test_the_busiest_gpu_sets_the_physical_limit(
    devices: list[tuple[int, int]], expected: float
) -> None:
    copies = limit_copies(plans_of([[100, 100, 0], [100, 100, 0]]), put=True)
    assert physical_limit(copies, devices, [400.0] * 4) == pytest.approx(expected)
    assert physical_limit(copies, devices, [400.0, None, 400.0, 400.0]) is None
    assert physical_limit(copies, devices, []) is None


# GPUs.


class FakeCore:
    def __init__(self, count: int, joined: bool = True) -> None:
        self._count, self._joined = count, joined

    def device_count(self) -> int:
        return self._count

    def no_device_reason(self) -> str:
        return "none at all"

    def can_access_peer(self, one: int, other: int) -> bool:
        return self._joined or one == other


@pytest.mark.parametrize(
    ("count", "halves"),
    [(1, ((0,), (0,))), (2, ((0,), (1,))), (3, ((0,), (1, 2))), (8, ((0, 1, 2, 3), (4, 5, 6, 7)))],
)
def test_sources_take_the_first_half_of_the_gpus(
    monkeypatch: pytest.MonkeyPatch, count: int, halves: object
) -> None:
    monkeypatch.setattr(paths_module, "_core", FakeCore(count))
    assert paths_module.choose_rank_devices(None, "nvlink") == halves


@pytest.mark.parametrize(("count", "pair"), [(1, (0, 0)), (2, (0, 1)), (8, (0, 1))])
def test_one_pair_takes_the_first_two_gpus(
    monkeypatch: pytest.MonkeyPatch, count: int, pair: tuple[int, int]
) -> None:
    monkeypatch.setattr(paths_module, "_core", FakeCore(count))
    assert paths_module.choose_devices(None, "nvlink") == pair
    assert paths_module.choose_devices((0, 0), "nvlink") == (0, 0)


def test_gpus_that_are_not_there_or_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths_module, "_core", FakeCore(0))
    with pytest.raises(NotAvailable, match="none at all"):
        paths_module.choose_rank_devices(None, "nvlink")
    with pytest.raises(NotAvailable, match="none at all"):
        paths_module.choose_devices(None, "nvlink")
    monkeypatch.setattr(paths_module, "_core", FakeCore(4, joined=False))
    with pytest.raises(InvalidUsage, match="device 4; this process sees 0 to 3"):
        paths_module.choose_rank_devices(((0, 1), (2, 4)), "nvlink")
    with pytest.raises(NotAvailable, match="GPUs 0 and 2 have no peer access"):
        paths_module.choose_rank_devices(None, "nvlink")


@pytest.mark.parametrize("transport", ["ucx", "nixl"])
def test_a_network_joins_gpus_without_peer_access(
    monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    monkeypatch.setattr(paths_module, "_core", FakeCore(4, joined=False))
    assert paths_module.choose_devices(None, transport) == (0, 1)
    assert paths_module.choose_devices((3, 1), transport) == (3, 1)
    assert paths_module.choose_rank_devices(None, transport) == ((0, 1), (2, 3))
    with pytest.raises(InvalidUsage, match="device 4; this process sees 0 to 3"):
        paths_module.choose_devices((0, 4), transport)
