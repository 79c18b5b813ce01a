"""shares(): exhaustively, every (layer, head) has one sender, and replicas share the work."""

from fractions import Fraction
from itertools import product

import pytest
from kv_oracle import heads_of, stage_layers

from kvxfer.layout import KVLayout, KVShard, Share, TPLayout, shares

TP_SIZES = (1, 2, 3, 4, 6, 8, 16)
NUM_HEADS = (1, 2, 4, 8)
STAGES = (1, 2, 3, (1, 5), (4, 5), (2, 3, 5))
NUM_LAYERS = 5

Stages = int | tuple[int, ...]


def model(num_heads: int | str, num_layers: int = NUM_LAYERS) -> KVLayout:
    if num_heads == "mla":
        return KVLayout(num_layers, 1, head_dim=4, kv="mla")
    return KVLayout(num_layers, num_heads, head_dim=4)


def ranks(layout: KVLayout, tp_size: int, stages: Stages = 1) -> list[KVShard]:
    parts = stage_layers(layout.num_layers, stages)
    return [
        KVShard(
            layout,
            TPLayout(
                tp_size,
                rank,
                pp_size=len(parts),
                pp_rank=stage,
                layers=None if isinstance(stages, int) else (layers.start, layers.stop),
            ),
        )
        for stage, layers in enumerate(parts)
        for rank in range(tp_size)
    ]


def pairs_of(sent: tuple[Share, ...]) -> list[tuple[int, int]]:
    return [pair for share in sent for pair in product(share.layers, share.heads)]


def check_once(src: list[KVShard], dst: list[KVShard]) -> None:
    """Fail unless each (layer, head) of each destination comes once, from one that holds it."""
    for to in dst:
        arrived = []
        for sender in src:
            sent = shares(sender, to)
            assert len(sent) <= 3
            assert all(share.size > 0 for share in sent)
            held = set(product(sender.layers, sender.heads))
            assert held.issuperset(pairs_of(sent)), f"{sender.rank} sends what it does not hold"
            arrived += pairs_of(sent)
        assert sorted(arrived) == sorted(product(to.layers, to.heads)), f"at {to.rank}"


@pytest.mark.parametrize("num_heads", [*NUM_HEADS, "mla"])
@pytest.mark.parametrize("src_tp", TP_SIZES)
def test_every_layer_and_head_comes_once(src_tp: int, num_heads: int | str) -> None:
    layout = model(num_heads)
    src = ranks(layout, src_tp)
    for dst_tp in TP_SIZES:
        check_once(src, ranks(layout, dst_tp))


@pytest.mark.parametrize("dst_stages", STAGES, ids=str)
@pytest.mark.parametrize("src_stages", STAGES, ids=str)
def test_so_it_does_between_pipelines(src_stages: Stages, dst_stages: Stages) -> None:
    for num_heads, src_tp, dst_tp in product((2, 8, "mla"), (1, 3, 4), (1, 2, 6)):
        layout = model(num_heads)
        check_once(ranks(layout, src_tp, src_stages), ranks(layout, dst_tp, dst_stages))


def test_check_once_sees_a_missing_and_a_doubled_sender() -> None:
    src, dst = ranks(model(2), 4), ranks(model(2), 2)
    with pytest.raises(AssertionError, match="at TPLayout"):
        check_once(src[1:], dst)
    with pytest.raises(AssertionError, match="at TPLayout"):
        check_once([*src, src[0]], dst)


@pytest.mark.parametrize("num_layers", [1, 5, 126])
@pytest.mark.parametrize("num_heads", NUM_HEADS)
@pytest.mark.parametrize("src_tp", TP_SIZES)
def test_work_is_shared_as_evenly_as_whole_layers_allow(
    src_tp: int, num_heads: int, num_layers: int
) -> None:
    layout = model(num_heads, num_layers)
    src = ranks(layout, src_tp)
    totals = [len(pairs_of(shares(sender, ranks(layout, 1)[0]))) for sender in src]
    assert max(totals) - min(totals) <= 1
    for dst_tp in TP_SIZES:
        for to, (rank, sender) in product(ranks(layout, dst_tp), enumerate(src)):
            begin, end = (Fraction(at * num_heads, src_tp) for at in (rank, rank + 1))
            fair = max(min(end, to.heads.stop) - max(begin, to.heads.start), 0) * num_layers
            assert abs(len(pairs_of(shares(sender, to))) - fair) < 1


@pytest.mark.parametrize("num_layers", [1, 5, 126])
@pytest.mark.parametrize("num_heads", [*NUM_HEADS, "mla"])
@pytest.mark.parametrize("src_tp", TP_SIZES)
def test_replicas_of_a_head_send_equally_much_of_it(
    src_tp: int, num_heads: int | str, num_layers: int
) -> None:
    layout = model(num_heads, num_layers)
    if src_tp % layout.num_kv_heads:
        # A head that a boundary cuts is shared as it is cut: see the test above.
        return
    for dst_tp in TP_SIZES:
        for to, head in product(ranks(layout, dst_tp), range(layout.num_kv_heads)):
            if head not in to.heads:
                continue
            sent = [
                sum(pair[1] == head for pair in pairs_of(shares(sender, to)))
                for sender in ranks(layout, src_tp)
                if head in sender.heads
            ]
            assert max(sent) - min(sent) <= 1


def test_equal_layouts_send_all_to_themselves() -> None:
    for tp_size in (1, 2, 4, 8):
        every = ranks(model(8), tp_size)
        for sender, to in product(every, every):
            expected = (Share(sender.layers, sender.heads),) if sender == to else ()
            assert shares(sender, to) == expected


def test_three_to_two_by_hand() -> None:
    layout = model(8, 3)
    src, dst = ranks(layout, 3), ranks(layout, 2)
    assert [list(heads_of(rank, 3, 8)) for rank in range(3)] == [
        [0, 1, 2],
        [2, 3, 4, 5],
        [5, 6, 7],
    ]
    # Rank 0 owns [0, 2 2/3): of head 2 the layers whose middle lies below 2/3.
    assert shares(src[0], dst[0]) == (
        Share(range(3), range(2)),
        Share(range(2), range(2, 3)),
    )
    assert shares(src[1], dst[0]) == (
        Share(range(2, 3), range(2, 3)),
        Share(range(3), range(3, 4)),
    )
    assert shares(src[2], dst[0]) == ()


def test_replicas_of_one_latent_by_hand() -> None:
    # Both peers must agree on the layer in the middle: its point belongs to the second half.
    for num_layers, middle in ((4, 2), (5, 2)):
        layout = model("mla", num_layers)
        (to,) = ranks(layout, 1)
        first, second = (shares(sender, to) for sender in ranks(layout, 2))
        assert first == (Share(range(middle), range(1)),)
        assert second == (Share(range(middle, num_layers), range(1)),)
