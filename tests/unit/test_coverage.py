"""A group of ranks that is not the whole other side is refused, by name."""

import pytest

from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVLayout, KVShard, TPLayout
from kvxfer.session.coverage import require_complete
from kvxfer.transport import Op

MODEL = KVLayout(4, 4, head_dim=8)
WHOLE = KVShard(MODEL)


def ranks(tp_size: int, *, pp_size: int = 1) -> list[KVShard]:
    return [
        KVShard(MODEL, TPLayout(tp_size, tp_rank, pp_size=pp_size, pp_rank=pp_rank))
        for pp_rank in range(pp_size)
        for tp_rank in range(tp_size)
    ]


@pytest.mark.parametrize("near", [WHOLE, *ranks(3), *ranks(2, pp_size=2)], ids=str)
@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (3, 1), (8, 1), (2, 4), (6, 2)])
def test_all_ranks_of_the_other_side_are_complete(
    near: KVShard, op: Op, tp_size: int, pp_size: int
) -> None:
    require_complete(near, ranks(tp_size, pp_size=pp_size), op)


@pytest.mark.parametrize(
    ("far", "op", "message"),
    [
        (ranks(2)[:1], Op.GET, "no sender for layer 0, head 2"),
        (ranks(2)[1:], Op.PUT, "no rank 0 of 2 for layer 0"),
        ([*ranks(2), ranks(2)[0]], Op.GET, "2 times sender for layer 0, head 0"),
        ([*ranks(2), ranks(2)[1]], Op.PUT, "2 times rank 1 of 2 for layer 0"),
        (ranks(1, pp_size=2)[:1], Op.GET, "no sender for layer 2, head 0"),
        (ranks(1, pp_size=2)[:1], Op.PUT, "no rank 0 of 1 for layer 2"),
        ([*ranks(2)[:1], *ranks(4)[2:]], Op.PUT, "ranks of tp sizes 2, 4"),
    ],
)
def test_a_missing_or_doubled_rank_is_named(far: list[KVShard], op: Op, message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        require_complete(WHOLE, far, op)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (((0, 2), (1, 4)), "2 times sender for layer 1, head 0"),
        (((0, 1), (2, 4)), "no sender for layer 1, head 0"),
    ],
)
def test_stages_that_overlap_or_leave_a_gap(
    stages: tuple[tuple[int, int], ...], message: str
) -> None:
    far = [KVShard(MODEL, TPLayout(pp_size=2, pp_rank=n, layers=s)) for n, s in enumerate(stages)]
    with pytest.raises(InvalidUsage, match=message):
        require_complete(WHOLE, far, Op.GET)


def test_ranks_that_get_nothing_from_here_need_not_be_there() -> None:
    near = ranks(2)[0]
    require_complete(near, ranks(4)[:2], Op.PUT)
