"""All plans of a request between two parallel layouts: what they take to make, and to keep."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvxfer import load_model
from kvxfer.layout import BlockMap, CopyBox, CopyPlan, KVLayout, KVShard, KVView, Route, TPLayout

SRC_TP, DST_TP = 8, 6
ROUNDS = 10
MOST_TABLE_BYTES = 1 << 20
BOX_BYTES = 8 * len(CopyBox._fields)

Views = tuple[list[KVView], list[KVView]]


def views(layout: KVLayout, num_blocks: int) -> Views:
    """The caches of all ranks of both sides, each in an address space of its own."""
    sides = []
    for tp_size in (SRC_TP, DST_TP):
        shards = [KVShard(layout, TPLayout(tp_size, rank)) for rank in range(tp_size)]
        sides.append([KVView.dense(shard, num_blocks, 1 << 40) for shard in shards])
    return sides[0], sides[1]


def plan_all(sides: Views, tables: Any) -> list[CopyPlan]:
    """Plans of all pairs of ranks that move something, from routes and a block map made anew."""
    block_size = sides[0][0].layout.block_size
    blocks = BlockMap(
        tables.source, tables.destination, src_block_size=block_size, dst_block_size=block_size
    )
    plans = [Route(src, dst).plan(blocks) for src in sides[0] for dst in sides[1]]
    return [made for made in plans if made.boxes]


def table_bytes(plans: list[CopyPlan]) -> int:
    """Bytes of the tables of all plans; a table that plans share counts once."""
    tables = {
        id(table): table.nbytes
        for made in plans
        for table in (made.src_planes, made.dst_planes, made.segments, made.inverse_scales)
    }
    return sum(tables.values()) + BOX_BYTES * sum(len(made.boxes) for made in plans)


@pytest.mark.benchmark(group=f"all plans, llama-3.1-405b, TP {SRC_TP} to {DST_TP}")
@pytest.mark.parametrize("num_tokens", [16384, 32768, 65536, 131072])
def test_plan_cost(benchmark: Any, num_tokens: int, draw_tables: Callable[[int], Any]) -> None:
    layout = load_model("llama-3.1-405b").kv_layout()
    tables = draw_tables(layout.num_blocks(num_tokens))
    sides = views(layout, tables.num_blocks)
    plans = benchmark.pedantic(plan_all, args=(sides, tables), rounds=ROUNDS, warmup_rounds=1)
    held = sum(len(dst.shard.heads) for dst in sides[1])
    assert sum(made.total_bytes for made in plans) == (
        layout.request_bytes(num_tokens) // layout.num_kv_heads * held
    )
    assert table_bytes(plans) <= MOST_TABLE_BYTES
    benchmark.extra_info.update(
        num_plans=len(plans),
        num_runs=sum(made.num_runs for made in plans),
        total_bytes=sum(made.total_bytes for made in plans),
        table_bytes=table_bytes(plans),
    )


def test_tables_grow_with_layers_plus_blocks(draw_tables: Callable[[int], Any]) -> None:
    once = load_model("llama-3.1-405b").kv_layout()
    twice = replace(once, num_layers=2 * once.num_layers)

    def measure(layout: KVLayout, num_blocks: int) -> int:
        tables = draw_tables(num_blocks)
        return table_bytes(plan_all(views(layout, tables.num_blocks), tables))

    for num_blocks in (1024, 8192):
        more_layers = measure(twice, num_blocks) - measure(once, num_blocks)
        # K and V of each layer, at both sides, for at most every head of every destination.
        assert 0 < more_layers <= once.num_layers * 2 * 16 * 2 * DST_TP
        for layout in (once, twice):
            added = measure(layout, 2 * num_blocks) - measure(layout, num_blocks)
            assert added == 16 * num_blocks
