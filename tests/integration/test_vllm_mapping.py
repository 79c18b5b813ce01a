"""Which KV heads a rank holds, and who sends them: ours against the mapping of an installed vLLM.

vLLM knows sizes that divide alone, so these are compared.
"""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.layout import KVLayout, KVShard, TPLayout, shares

pytest.importorskip("vllm", reason="vllm is not installed")

# torch and vllm warn of their own future.
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = (1, 2, 4, 8, 16)
NUM_HEADS = (1, 2, 4, 8)


def heads_of(num_heads: int, tp_size: int, tp_rank: int) -> range:
    return TPLayout(tp_size, tp_rank).heads_of(num_heads)


@pytest.fixture(scope="module")
def tp_mapping() -> Any:
    return pytest.importorskip(
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping",
        reason="this vllm has no tp_mapping",
    )


def mapping(tp_mapping: Any, num_heads: int, tp_size: int, tp_rank: int, remote_tp: int) -> Any:
    """Which remote ranks vLLM's rank reads, and from which head on."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    topology = SimpleNamespace(
        tp_rank=tp_rank,
        tp_size=tp_size,
        total_num_kv_heads=num_heads,
        is_mla=False,
        dcp_consumer_count=lambda *_: 1,
    )
    return tp_mapping.compute_tp_mapping(topology, remote_tp, (FullAttentionSpec,))


@pytest.mark.parametrize(("num_heads", "tp_size"), [*product(NUM_HEADS, SIZES)])
def test_a_rank_holds_as_many_heads(num_heads: int, tp_size: int) -> None:
    from vllm.config import ModelConfig

    model = SimpleNamespace(
        use_mla=False,
        model_arch_config=SimpleNamespace(total_num_kv_heads=num_heads),
        get_total_num_kv_heads=lambda: num_heads,
    )
    parallel = SimpleNamespace(tensor_parallel_size=tp_size)
    theirs = ModelConfig.get_num_kv_heads(model, parallel)
    ours = {len(heads_of(num_heads, tp_size, rank)) for rank in range(tp_size)}
    assert ours == {theirs}


@pytest.mark.parametrize(("num_heads", "tp_size"), [*product(NUM_HEADS, SIZES)])
def test_a_rank_loads_the_same_heads(
    num_heads: int, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from vllm.model_executor.layers import linear

    # As many heads of queries as ranks, so that these divide too.
    monkeypatch.setattr(linear, "get_tensor_model_parallel_world_size", lambda: tp_size)
    found = []
    for rank in range(tp_size):
        layer = linear.QKVParallelLinear.__new__(linear.QKVParallelLinear)
        monkeypatch.setattr(linear.ColumnParallelLinear, "__init__", lambda self, **_: None)
        layer.__init__(8, 1, 16 * num_heads, num_heads)
        held = torch.arange(num_heads)
        shard = rank // layer.num_kv_head_replicas
        found.append(held.narrow(0, shard * layer.num_kv_heads, layer.num_kv_heads).tolist())
    assert found == [list(heads_of(num_heads, tp_size, rank)) for rank in range(tp_size)]


@pytest.mark.parametrize("num_heads", NUM_HEADS)
@pytest.mark.parametrize(("tp_size", "remote_tp"), [*product(SIZES, SIZES)])
def test_the_ranks_that_vllm_reads_hold_what_is_read(
    tp_mapping: Any, num_heads: int, tp_size: int, remote_tp: int
) -> None:
    for rank in range(tp_size):
        wanted = list(heads_of(num_heads, tp_size, rank))
        found = mapping(tp_mapping, num_heads, tp_size, rank, remote_tp)
        sources = [heads_of(num_heads, remote_tp, source) for source in found.all_source_ranks]
        if tp_size > remote_tp:
            (source,) = sources
            first = source.start + found.rank_offset_factor * len(wanted)
            read = list(source)[first - source.start :][: len(wanted)]
        else:
            read = [head for source in sources for head in source]
        assert read == wanted


@pytest.mark.parametrize("num_heads", NUM_HEADS)
@pytest.mark.parametrize(("tp_size", "remote_tp"), [*product(SIZES, SIZES)])
def test_without_replicas_the_senders_are_the_same(
    tp_mapping: Any, num_heads: int, tp_size: int, remote_tp: int
) -> None:
    if remote_tp > num_heads:
        return  # ours share the work among the replicas of a head, vLLM reads the first
    model = KVLayout(4, num_heads, head_dim=1)
    for rank in range(tp_size):
        to = KVShard(model, TPLayout(tp_size, rank))
        ours = [
            source
            for source in range(remote_tp)
            if shares(KVShard(model, TPLayout(remote_tp, source)), to)
        ]
        assert ours == list(
            mapping(tp_mapping, num_heads, tp_size, rank, remote_tp).all_source_ranks
        )
