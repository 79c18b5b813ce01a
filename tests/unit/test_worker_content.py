"""What the name of a request says of its content, and where its tokens lie."""

import numpy as np
import pytest

from kvxfer.errors import InvalidUsage
from kvxfer.sweep.token_runs import TokenRuns
from kvxfer.worker.content import content_of, request_name, tokens_in_blocks


def test_a_name_says_dtype_and_seed() -> None:
    names = [request_name(run, number, "bfloat16") for run in "ab" for number in range(3)]
    contents = [content_of(name) for name in names]
    assert {one.dtype for one in contents if one} == {"bfloat16"}
    assert len({one.seed for one in contents if one}) == len(names)
    assert content_of(names[0]) == contents[0]


@pytest.mark.parametrize(
    "name", ["", "cmpl-7f3a", "kvxfer.a.1", "kvxfer.a.1.decimal", "kvxfer.a.x.bfloat16", "x" * 256]
)
def test_other_names_say_nothing(name: str) -> None:
    assert content_of(name) is None


@pytest.mark.parametrize("run", ["", "a.b", "a b", "x" * 65, "é"])
def test_a_run_has_a_plain_name(run: str) -> None:
    with pytest.raises(InvalidUsage, match="letters, digits"):
        request_name(run, 0, "bfloat16")


def token_places(runs: TokenRuns) -> dict[int, tuple[int, int]]:
    """Block and slot by token, one by one."""
    places = {}
    for block, slot, count, key in zip(
        runs.block_ids, runs.slots, runs.counts, runs.keys, strict=True
    ):
        for step in range(count):
            places[int(key) + step] = (int(block), int(slot) + step)
    return places


@pytest.mark.parametrize("tokens", [range(12), range(5), range(3, 11), range(4, 5), range(4, 8)])
@pytest.mark.parametrize("first", [0, 8])
def test_tokens_lie_where_their_blocks_are(tokens: range, first: int) -> None:
    blocks = np.array([5, 2, 9])
    wanted = range(tokens.start + first, tokens.stop + first)
    runs = tokens_in_blocks(blocks, 4, wanted, first)
    assert runs.num_tokens == len(tokens)
    assert token_places(runs) == {
        token: (int(blocks[(token - first) // 4]), (token - first) % 4) for token in wanted
    }


def test_no_tokens_have_no_runs() -> None:
    assert tokens_in_blocks(np.array([], np.int64), 4, range(0)).num_tokens == 0


def test_tokens_outside_their_blocks_are_refused() -> None:
    with pytest.raises(InvalidUsage, match="2 blocks hold"):
        tokens_in_blocks(np.array([1, 2]), 4, range(9))
