"""From two block tables to a copy plan: the part of a transfer that grows with the request."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvxfer import KVView, load_model, plan

ROUNDS = 50
ITERATIONS = 10


@pytest.mark.benchmark(group="plan")
@pytest.mark.parametrize("ids", ["array", "list"])
@pytest.mark.parametrize("num_blocks", [512, 2048, 8192, 32768])
def test_plan(benchmark: Any, num_blocks: int, ids: str, draw_tables: Callable[[int], Any]) -> None:
    layout = load_model("llama-3.1-8b").kv_layout()
    tables = draw_tables(num_blocks)
    plane_bytes = tables.num_blocks * layout.page_bytes

    def view(base: int) -> KVView:
        planes = np.arange(layout.num_planes, dtype=np.uint64) * np.uint64(plane_bytes)
        return KVView(
            layout,
            tables.num_blocks,
            plane_addresses=planes + np.uint64(base),
            block_stride_bytes=layout.page_bytes,
        )

    src_ids, dst_ids = tables.source, tables.destination
    if ids == "list":
        src_ids, dst_ids = src_ids.tolist(), dst_ids.tolist()
    made = benchmark.pedantic(
        plan,
        args=(view(1 << 40), view(1 << 42), src_ids, dst_ids),
        rounds=ROUNDS,
        iterations=ITERATIONS,
        warmup_rounds=2,
    )
    assert (made.src_offsets == tables.source * layout.page_bytes).all()
    assert (made.dst_offsets == tables.destination * layout.page_bytes).all()
    assert made.num_pages == num_blocks * layout.num_planes
    benchmark.extra_info.update(num_pages=made.num_pages, table_bytes=made.table_bytes)
