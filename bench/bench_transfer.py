"""A request's blocks from one process to another: page sizes, a model's shape, SM budgets."""

from collections.abc import Callable
from typing import Any

import pytest

from kvxfer import KVLayout, available_transports, load_model
from kvxfer.transport import Tuning

KIB = 1 << 10
# A host moves a request of this size in milliseconds, a GPU one of that.
TOTAL_BYTES = {"shm": 32 << 20, "loopback": 32 << 20, "nvlink": 1 << 30}
NUM_PLANES = 64
ROUNDS = 20


def paged(page_bytes: int) -> KVLayout:
    """As many planes as a model of 32 layers has, each page of ``page_bytes``."""
    return KVLayout(
        NUM_PLANES, 1, head_dim=page_bytes // 16, dtype="uint8", block_size=16, kv="mla"
    )


@pytest.mark.benchmark(group="page size")
@pytest.mark.parametrize("page_bytes", [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB])
def test_page_size(
    path: Any,
    page_bytes: int,
    kvxfer_pair: Any,
    kvxfer_benchmark: Any,
    draw_tables: Callable[[int], Any],
) -> None:
    layout = paged(page_bytes)
    tables = draw_tables(TOTAL_BYTES[path.transport] // layout.block_bytes)
    pair = kvxfer_pair(
        layout=layout,
        num_blocks=tables.num_blocks,
        transport=path.transport,
        memory=path.memory,
    )
    kvxfer_benchmark(pair, tables.source, tables.destination, rounds=ROUNDS)


@pytest.mark.benchmark(group="llama-3.1-8b, 512 tokens")
@pytest.mark.parametrize("op", ["put", "get"])
def test_llama_8b(
    path: Any,
    op: str,
    kvxfer_pair: Any,
    kvxfer_benchmark: Any,
    draw_tables: Callable[[int], Any],
) -> None:
    layout = load_model("llama-3.1-8b").kv_layout()
    tables = draw_tables(layout.num_blocks(512))
    pair = kvxfer_pair(
        layout=layout,
        num_blocks=tables.num_blocks,
        transport=path.transport,
        memory=path.memory,
        op=op,
    )
    kvxfer_benchmark(pair, tables.source, tables.destination, rounds=ROUNDS)


@pytest.mark.benchmark(group="SM budget, 16 KiB pages")
@pytest.mark.parametrize("num_sms", [4, 8, 16, 32])
def test_sm_budget(
    num_sms: int,
    kvxfer_pair: Any,
    kvxfer_benchmark: Any,
    draw_tables: Callable[[int], Any],
) -> None:
    found = available_transports()["nvlink"]
    if not found.available:
        pytest.skip(f"nvlink: {found.reason}")
    layout = paged(16 * KIB)
    tables = draw_tables(TOTAL_BYTES["nvlink"] // layout.block_bytes)
    pair = kvxfer_pair(
        layout=layout,
        num_blocks=tables.num_blocks,
        transport="nvlink",
        tuning=Tuning(num_sms=num_sms),
    )
    kvxfer_benchmark(pair, tables.source, tables.destination, rounds=ROUNDS)
