"""Layers in groups: every layer moves its own tokens between the tables of its groups."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from carry_out import carry_out
from group_cases import GroupCase, GroupSide, group_cases
from hypothesis import given, settings
from kv_oracle import Blocks, compare

from kvxfer.errors import InvalidUsage
from kvxfer.layout import (
    BlockMap,
    BlockTable,
    BlockTables,
    KVLayout,
    KVShard,
    KVView,
    Route,
    TPLayout,
)

ADDRESS = 64


def run(case: GroupCase) -> None:
    """Plan and carry out; fail where a byte of the destination is not what it should be."""
    src, dst = case.source_bytes(), case.dst.cache.fresh(0xEEEE)
    memory = np.concatenate([np.zeros(ADDRESS, np.uint8), src, dst])
    views = case.src.view(ADDRESS, case.windows), case.dst.view(ADDRESS + src.size, case.windows)
    plan = Route(*views, layers=case.layers).plan(case.block_map())
    written = carry_out(plan, memory)
    assert plan.total_bytes == len(written)
    assert (memory[ADDRESS : ADDRESS + src.size] == src).all()
    compare(case.dst.cache, memory[ADDRESS + src.size :], case.expected_bytes())


@settings(max_examples=300)
@given(group_cases())
def test_every_layer_goes_by_the_tables_of_its_groups(case: GroupCase) -> None:
    run(case)


def hybrid() -> GroupCase:
    """Full and sliding layers in turns: two tables over one memory here, one table over there.

    Tokens 4 to 7, the second chunk of a request of 8; a window of 3 needs tokens 5 to 7.
    """
    tables = Blocks((3, 1, 0, 5), 0, 2), Blocks((2, 4), 4, 2)
    src = GroupSide((0, 1, 0, 1), (0, 0, 1, 1), tables, "split", "nhd", 6, 1)
    dst = GroupSide((0,) * 4, (0, 1, 2, 3), (Blocks((1, 2), 0, 4),), "packed", "hnd", 3, 1)
    return GroupCase((0, 3, 0, 3), src, dst, range(4, 8), 8)


def back() -> GroupCase:
    """The same the other way about, where the sliding group's table begins at its window."""
    case = hybrid()
    src = replace(case.src, tables=(Blocks((3, 1, 0, 5), 0, 2), Blocks((2, 4), 4, 2)))
    return replace(case, src=case.dst, dst=src)


@pytest.mark.parametrize("case", [hybrid(), back()], ids=["from groups", "to groups"])
def test_a_hybrid_model_by_hand(case: GroupCase) -> None:
    run(case)
    assert case.moved() == {0: range(4, 8), 1: range(5, 8), 2: range(4, 8), 3: range(5, 8)}


# The check, seen to fail.


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (hybrid(), {"src_blocks": BlockTables([[3, 1, 0, 5], BlockTable([4, 2], 4)])}),
        (hybrid(), {"end": 9}),
        (hybrid(), {"tokens": range(4, 7)}),
        (back(), {"dst_blocks": BlockTables([[3, 1, 0, 5], BlockTable([4, 2], 4)])}),
        (back(), {"dst_blocks": BlockTables([[3, 1, 4, 5], BlockTable([2, 0], 4)])}),
        (back(), {"end": 10}),
    ],
)
def test_a_wrong_table_or_end_is_found(case: GroupCase, changes: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=r"layer \d, [KV], block"):
        run(replace(case, changes=changes))


def test_a_layer_in_the_wrong_group_is_found() -> None:
    case = back()
    wrong = replace(case.dst, groups=(0, 1, 1, 0), slots=(0, 0, 1, 1))
    with pytest.raises(AssertionError, match=r"layer \d, [KV], block"):
        _run_with(case, wrong)


def _run_with(case: GroupCase, dst: GroupSide) -> None:
    """`run` with a destination's view that is not that of the case."""
    src, memory_of = case.source_bytes(), case.dst.cache.fresh(0xEEEE)
    memory = np.concatenate([np.zeros(ADDRESS, np.uint8), src, memory_of])
    views = case.src.view(ADDRESS, case.windows), dst.view(ADDRESS + src.size, case.windows)
    carry_out(Route(*views).plan(case.block_map()), memory)
    compare(case.dst.cache, memory[ADDRESS + src.size :], case.expected_bytes())


# Layouts and tables that cannot be.

HYBRID = KVLayout(4, 1, head_dim=8, block_size=4, windows=(0, 6, 0, 6), groups=(0, 1, 0, 1))


def test_what_the_groups_of_a_request_need() -> None:
    assert HYBRID.num_groups == 2
    assert HYBRID.needed(range(3, 21)) == (range(3, 21), range(15, 21))
    assert HYBRID.needed_blocks(range(3, 21)) == (range(6), range(3, 6))
    assert HYBRID.needed_blocks(range(0)) == (range(0), range(0))
    one = replace(HYBRID, groups=())
    assert one.needed(range(21)) == (range(21),)
    unused = replace(HYBRID, groups=(0, 2, 0, 2))
    assert unused.needed_blocks(range(21)) == (range(6), range(0), range(3, 6))
    assert replace(HYBRID, groups=(0, 0, 0, 0)) == one


def test_a_pipeline_rank_keeps_the_numbers_of_its_groups() -> None:
    model = replace(HYBRID, groups=(0, 0, 1, 1))
    own = KVShard(model, TPLayout(pp_size=2, pp_rank=1)).layout
    assert (own.groups, own.num_groups) == ((1, 1), 2)


@pytest.mark.parametrize("groups", [(0, 1), (0, 1, 0, 256), (0, 1, 0, -1), (0, 1, 0, True)])
def test_wrong_groups_are_refused(groups: tuple[int, ...]) -> None:
    with pytest.raises(InvalidUsage, match="groups"):
        replace(HYBRID, groups=groups)


def match(src: Any, dst: Any, **more: Any) -> BlockMap:
    return BlockMap(src, dst, src_block_size=4, dst_block_size=4, **more)


TWO = BlockTables([[0, 1], BlockTable([2], 4)])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: match(TWO, TWO), "do not say which tokens to move"),
        (lambda: match([0], TWO, tokens=[range(4)]), "1 ranges of tokens for 2 tables"),
        (lambda: match([0], TWO, tokens=[range(4), 4]), "use a range of step 1"),
        (
            lambda: match([0], BlockTables([[1, 2], BlockTable([2], 4)]), tokens=range(8)),
            r"dst_block_ids\[1\] and dst_block_ids\[2\] are both 2",
        ),
        (
            lambda: match([0], BlockTables([[1], [9]]), tokens=range(4), dst_num_blocks=9),
            r"dst_block_ids of group 1\[0\] is 9; this view has 9 blocks",
        ),
        (lambda: BlockTables([[0], [0.5]]), "use integers"),
    ],
)
def test_wrong_tables_of_groups_are_refused(make: Any, text: str) -> None:
    with pytest.raises(InvalidUsage, match=text):
        make()


def test_every_group_must_have_its_table_and_its_tokens() -> None:
    view = KVView.dense(KVShard(HYBRID), 8, 0)
    route = Route(view, view)
    with pytest.raises(InvalidUsage, match=r"\(1, 2\) block tables for caches .* \(2, 2\) groups"):
        route.plan(match([0, 1], TWO, tokens=range(8)))
    with pytest.raises(
        InvalidUsage, match=r"src_block_ids of group 1 hold tokens 4 to 7, .* 2 to 7"
    ):
        route.plan(match(TWO, BlockTables([[0, 1], [2, 3]]), tokens=range(8)))
    assert route.plan(match(TWO, TWO, tokens=range(8), end=10)).total_bytes > 0
