"""Puts raced with kernels that take their time: the source is read after the work that fills it."""

from collections.abc import Callable
from typing import Any

import numpy as np
from cache_content import shape
from cuda_driver import synchronize
from gpu_pairs import GpuPair
from peer_process import DEADLINE_S

CACHE = shape(num_layers=4, block_size=128)  # 128 pages of 4 KiB
ALL_BLOCKS = list(range(16))
SLEEP_CYCLES = 20_000_000  # about 10 ms

Post = Callable[[GpuPair, int], Any]


def stamp_slowly(torch: Any, pair: GpuPair, stream: Any, round_number: int) -> None:
    """Queue on ``stream``: nothing for a while, then the round's stamps into all pages."""
    local = pair.local
    local.stamp_host_copy(round_number, ALL_BLOCKS)
    staged = torch.from_numpy(np.stack(local._raw)).to("cuda:0")
    synchronize(0)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        local.memory[0].owner.copy_(staged.reshape(-1))


def put_after(pair: GpuPair, stream: int) -> Any:
    return pair.peer.put(ALL_BLOCKS, ALL_BLOCKS, after=stream)


def race(
    torch: Any,
    pair: GpuPair,
    stream: Any,
    *,
    num_rounds: int,
    post: Post = put_after,
    num_puts: int = 1,
) -> None:
    """Put at once what a slow stream is to write first; fail where old pages arrive.

    ``num_puts``: transfers that ``post`` makes.
    """
    for round_number in range(1, num_rounds + 1):
        result = pair.remote.start(
            "expect",
            incarnation=pair.local.endpoint.incarnation,
            sequence=round_number * num_puts,
            round_number=round_number,
            src_block_ids=ALL_BLOCKS,
            dst_block_ids=ALL_BLOCKS,
            timeout_s=DEADLINE_S,
        )
        stamp_slowly(torch, pair, stream, round_number)
        post(pair, stream.cuda_stream)
        outcome = result()
        assert outcome["signalled"]
        num_stale = outcome["num_stale"]
        assert num_stale == 0, f"round {round_number}: {num_stale} pages are of an earlier round"
    synchronize(0)
