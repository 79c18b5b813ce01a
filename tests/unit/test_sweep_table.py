"""The table of a sweep: whole at any width, and rows that can be told apart."""

import io
from dataclasses import dataclass

import msgspec
import pytest
from rich.console import Console

from kvxfer.report.sweep_table import COLUMNS, print_report, remarks
from kvxfer.sweep.result import SCHEMA, Latency, Median, Rate, SweepReport, SweepResult


@dataclass
class Shape:
    num_tokens: int
    block_order: str


def result_of(shape: Shape) -> SweepResult:
    return SweepResult(
        transport="shm",
        model="llama-3.1-8b",
        num_tokens=shape.num_tokens,
        block_size=16,
        page_bytes=32768,
        num_pages=shape.num_tokens * 4,
        total_bytes=1 << 27,
        src_tp=1,
        dst_tp=1,
        order="nhd",
        block_order=shape.block_order,
        sm_count=0,
        num_threads=2,
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
        memory="private",
        dtype="bfloat16",
    )


def printed(width: int, shapes: list[Shape], *, terminal: bool = True) -> str:
    report = SweepReport(
        schema=SCHEMA, environment={}, results=[result_of(shape) for shape in shapes]
    )
    out = io.StringIO()
    print_report(report, Console(file=out, width=width, force_terminal=terminal, no_color=True))
    return out.getvalue()


SWEPT = [Shape(512, "shuffled"), Shape(2048, "contiguous"), Shape(2048, "fragmented:8")]


@pytest.mark.parametrize("width", [80, 90, 100, 120, 140, 200])
def test_no_figure_is_cut(width: int) -> None:
    text = printed(width, SWEPT)
    assert "…" not in text
    for needed in ("17.63", "3.81 ms", "81%", "shm put, private", "contiguous", "fragmented:8"):
        assert needed in text
    table = [line for line in text.splitlines() if "shm put, private " in line]
    assert max(len(line.rstrip()) for line in table) <= width


def test_what_is_the_same_moves_above_the_table_and_the_rest_is_named() -> None:
    narrow = printed(80, SWEPT)
    assert "model llama-3.1-8b, block 16" in " ".join(narrow.split())
    assert "columns left out for want of width: plan, p90" in narrow
    wide = printed(200, SWEPT)
    assert "columns left out" not in wide
    assert all(name in wide for name in COLUMNS)


def test_a_pipe_gets_every_column() -> None:
    text = printed(80, SWEPT, terminal=False)
    assert all(name in text for name in COLUMNS)
    assert "columns left out" not in text


def test_rows_of_two_orders_differ() -> None:
    text = printed(80, [Shape(512, "shuffled"), Shape(512, "contiguous")])
    rows = [line for line in text.splitlines() if "17.63" in line]
    assert len(rows) == len(set(rows)) == 2


def test_the_result_here_is_a_whole_one() -> None:
    data = msgspec.json.encode(result_of(SWEPT[0]))
    assert msgspec.json.decode(data, type=SweepResult) == result_of(SWEPT[0])


def test_rows_of_one_label_that_took_two_paths_are_named() -> None:
    rows = [result_of(Shape(tokens, "shuffled")) for tokens in (512, 2048, 4096)]
    rows[0] = msgspec.structs.replace(rows[0], actual_path="shared segment, memcpy")
    label = "path of shm put, private: shared segment,"
    page = "page 32 KiB"
    assert remarks(SweepReport(schema=SCHEMA, environment={}, results=rows)) == [
        f"{label} memcpy (llama-3.1-8b 512 tokens, {page})",
        f"{label} streaming (llama-3.1-8b 2048 tokens, {page}; llama-3.1-8b 4096 tokens, {page})",
    ]
    same = SweepReport(schema=SCHEMA, environment={}, results=rows[1:])
    assert remarks(same) == [f"{label} streaming"]
