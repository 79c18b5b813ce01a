"""A sweep of ranks as a table, and one of layouts as a matrix."""

import csv
import io
import re
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kvxfer.report.export import to_csv, to_markdown
from kvxfer.report.sweep_table import print_report
from kvxfer.sweep.result import SCHEMA, Latency, Median, Rate, Skipped, SweepReport, SweepResult

NHD, HND, LMCACHE = "nhd split 16", "hnd split 16", "nhd chunked 256"


def result_of(src: str = NHD, dst: str = NHD, **changes: Any) -> SweepResult:
    result = SweepResult(
        transport="shm",
        model="llama-3.1-8b",
        num_tokens=512,
        block_size=16,
        page_bytes=16384,
        num_pages=2048,
        total_bytes=1 << 26,
        src_tp=2,
        dst_tp=1,
        order="nhd",
        block_order="shuffled",
        sm_count=0,
        num_threads=1,
        iters=5,
        gb_per_s=Rate(17.63, 16.0, 18.0),
        latency_us=Latency(3807.0, 3911.0, 4150.0),
        limit_gb_per_s=21.73,
        fraction_of_limit=0.81,
        plan_us=Median(73.5),
        post_us=Median(20.0),
        verified=True,
        actual_path="shared segment, streaming",
        notes=[],
        op="put",
        memory="shared",
        dtype="bfloat16",
        num_kv_heads=8,
        src_layout=src,
        dst_layout=dst,
        run_bytes=1024,
        num_runs=65536,
        rank_spread=1.25,
    )
    return msgspec.structs.replace(result, **changes)


def report_of(results: list[SweepResult], skipped: list[Skipped] | None = None) -> SweepReport:
    return SweepReport(schema=SCHEMA, environment={}, results=results, skipped=skipped or [])


def printed(report: SweepReport, width: int, *, terminal: bool = True) -> str:
    out = io.StringIO()
    print_report(report, Console(file=out, width=width, force_terminal=terminal, no_color=True))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_row_of_ranks_says_its_sizes_and_runs(width: int) -> None:
    results = [result_of(), result_of(src_tp=6, dst_tp=4, run_bytes=256)]
    text = printed(report_of(results), width)
    rows = [line for line in text.splitlines() if "17.63" in line]
    for row, needed in zip(rows, (("2:1", "1 KiB"), ("6:4", "256 B")), strict=True):
        assert len(row.rstrip()) <= width
        assert all(f" {word} " in row for word in (*needed, "3.81 ms", "81%"))
    assert " pp " not in text
    assert "…" not in text
    wide = printed(report_of([*results, result_of(src_pp=2)]), 250)
    assert re.search(r" 2:1 +2:1 ", wide)


def matrix_lines(text: str) -> dict[str, list[str]]:
    lines = [line.split() for line in text.splitlines()]
    found = [line for line in lines if line[:1] in (["nhd"], ["hnd"]) and "%" in " ".join(line)]
    return {" ".join(line[:3]): line[3:] for line in found}


def test_a_matrix_has_sources_as_rows_and_reasons_below() -> None:
    results = [
        result_of(NHD, NHD),
        result_of(NHD, HND, gb_per_s=Rate(5.0, 5.0, 5.0), fraction_of_limit=0.25),
        result_of(HND, NHD, gb_per_s=Rate(6.0, 6.0, 6.0), fraction_of_limit=0.5),
    ]
    skipped = [Skipped("hnd to hnd", "dtype is this and that", False, HND, HND)]
    text = printed(report_of(results, skipped), 80)
    assert matrix_lines(text) == {
        NHD: ["17.63", "(81%)", "5", "(25%)"],
        HND: ["6", "(50%)", "-"],
    }
    assert "skipped: hnd to hnd: dtype is this and that" in text
    assert "TP 2:1" in text


@pytest.mark.parametrize("width", [20, 40, 63, 64, 80])
def test_a_matrix_is_whole_or_a_list(width: int) -> None:
    layouts = (NHD, HND, LMCACHE)
    results = [result_of(src, dst) for src in layouts for dst in layouts if src != LMCACHE]
    skipped = [Skipped("case", "reason", False, LMCACHE, NHD)]
    text = printed(report_of(results, skipped), width)
    assert "…" not in text
    lines = text.splitlines()
    pairs = [line for line in lines if " -> " in line and ": " in line]
    if pairs:
        assert f"{NHD} -> {LMCACHE}: 17.63 (81%)" in pairs
        assert f"{LMCACHE} -> {NHD}: -" in pairs
        assert not matrix_lines("\n".join(set(lines) - set(pairs)))
    else:
        assert matrix_lines(text)[NHD] == ["17.63", "(81%)"] * 3
        assert max(len(line.rstrip()) for line in lines if "17.63" in line) <= width
    assert bool(pairs) == (width < 60)


def test_each_path_and_size_has_a_matrix_of_its_own() -> None:
    results = [
        result_of(NHD, dst, op=op, src_pp=pp)
        for op in ("put", "get")
        for pp in (1, 2)
        for dst in (NHD, HND)
    ]
    text = printed(report_of(results), 120)
    for title in ("shm put, shared, ", "shm get, shared, "):
        lines = [line for line in text.splitlines() if line.startswith(title)]
        assert len(lines) == 2
        assert "PP 2:1" in lines[1]


def test_one_layout_is_no_matrix() -> None:
    assert "of limit" in printed(report_of([result_of()]), 200)
    assert "of limit" in printed(report_of([result_of(NHD, HND)]), 200)


def test_a_note_says_of_which_layouts() -> None:
    results = [result_of(NHD, HND, notes=["a note"]), result_of(NHD, LMCACHE)]
    assert "512 tokens, TP 2:1, nhd split 16 -> hnd split 16): a note" in printed(
        report_of(results), 200
    )


def test_files_have_every_row_of_a_matrix() -> None:
    report = report_of([result_of(NHD, HND), result_of(HND, NHD)])
    lines = [line for line in to_markdown(report).splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert "nhd split 16 -> hnd split 16" in lines[2]
    assert len({line.count("|") for line in lines}) == 1
    rows = list(csv.DictReader(io.StringIO(to_csv(report))))
    assert [(row["src_layout"], row["dst_layout"]) for row in rows] == [(NHD, HND), (HND, NHD)]
