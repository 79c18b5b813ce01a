"""From two block tables to a copy plan: the part of a transfer that grows with the request."""

from collections.abc import Callable
from typing import Any

import pytest

from kvxfer.layout import KVShard, KVView, load_model, plan

ROUNDS = 50
ITERATIONS = 10


@pytest.mark.benchmark(group="plan")
@pytest.mark.parametrize("ids", ["array", "list"])
@pytest.mark.parametrize("num_blocks", [512, 2048, 8192, 32768])
def test_plan(benchmark: Any, num_blocks: int, ids: str, draw_tables: Callable[[int], Any]) -> None:
    layout = load_model("llama-3.1-8b").kv_layout()
    tables = draw_tables(num_blocks)
    shard = KVShard(layout)
    views = [KVView.dense(shard, tables.num_blocks, base) for base in (1 << 40, 1 << 42)]
    src_ids, dst_ids = tables.source, tables.destination
    if ids == "list":
        src_ids, dst_ids = src_ids.tolist(), dst_ids.tolist()
    made = benchmark.pedantic(
        plan,
        args=(*views, src_ids, dst_ids),
        rounds=ROUNDS,
        iterations=ITERATIONS,
        warmup_rounds=2,
    )
    assert (made.segments[:, 0] == tables.source).all()
    assert (made.segments[:, 1] == tables.destination).all()
    assert made.num_pages == num_blocks * layout.num_planes
    benchmark.extra_info.update(num_pages=made.num_pages, table_bytes=made.table_bytes)
