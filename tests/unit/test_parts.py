"""What a request's parts may be: every token of a layer once, and none missing at the end."""

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidUsage
from kvxfer.layout import BlockTable, KVLayout, KVShard, TPLayout
from kvxfer.session.parts import Parts

MODEL = KVLayout(4, 2, head_dim=8, block_size=4)
BLOCKS = list(range(8))  # tokens 0 to 31


def parts(tokens: range = range(20), model: KVLayout = MODEL, **rank: Any) -> Parts:
    return Parts("r", KVShard(model, TPLayout(**rank)), tokens)


def add(to: Parts, tokens: range | None = None, layers: Any = None, blocks: Any = BLOCKS) -> None:
    to.add(blocks, tokens, layers, None)


def test_one_part_may_be_all() -> None:
    made = parts()
    assert made.gap() == "token 0 of layer 0"
    add(made)
    assert made.gap() == ""
    (part,) = made.parts
    assert (part.tokens, part.layers, part.after) == (range(20), None, None)


@given(st.lists(st.integers(1, 19), unique=True, max_size=6), st.integers(0, 1 << 30))
def test_chunks_of_layers_in_any_order_are_all(cuts: list[int], seed: int) -> None:
    bounds = [0, *sorted(cuts), 20]
    chunks = [range(*pair) for pair in itertools.pairwise(bounds)]
    pieces = [(chunk, layer) for chunk in chunks for layer in range(4)]
    random.Random(seed).shuffle(pieces)
    made = parts()
    had: dict[int, set[int]] = {layer: set() for layer in range(4)}
    for chunk, layer in pieces:
        assert made.gap() == first_gap(had)
        add(made, chunk, [layer])
        had[layer] |= set(chunk)
    assert made.gap() == first_gap(had) == ""
    for chunk, layer in pieces:
        with pytest.raises(InvalidUsage, match=f"layer {layer} of request 'r' were sent before"):
            add(made, chunk, [layer])


def first_gap(had: dict[int, set[int]]) -> str:
    for layer, tokens in had.items():
        missing = set(range(20)) - tokens
        if missing:
            return f"token {min(missing)} of layer {layer}"
    return ""


def test_a_part_that_overlaps_is_refused_as_a_whole() -> None:
    made = parts()
    add(made, range(8), [2])
    with pytest.raises(InvalidUsage, match=r"tokens 0 to 7 of layer 2 .* send each token"):
        add(made, range(7, 20))
    assert len(made.parts) == 1
    add(made, range(8), [0, 1, 3])  # nothing of the refused part was noted
    add(made, range(8, 20))
    assert made.gap() == ""


@pytest.mark.parametrize("tokens", [range(8, 8), range(20, 20), range(0)])
def test_a_part_of_no_tokens_changes_nothing(tokens: range) -> None:
    made = parts()
    add(made, tokens, blocks=[])
    add(made, tokens, blocks=[])
    assert made.gap() == "token 0 of layer 0"


def test_a_request_of_no_tokens_lacks_nothing() -> None:
    assert parts(range(0)).gap() == ""


def test_a_rank_has_its_own_layers_only() -> None:
    made = parts(pp_size=2, pp_rank=1)
    with pytest.raises(InvalidUsage, match=r"layers \[1\] of request 'r'; this rank holds 2 to 3"):
        add(made, layers=[1, 2])
    add(made, layers=[3])
    assert made.gap() == "token 0 of layer 2"
    add(made, layers=[2])
    assert made.gap() == ""


def test_layers_that_slide_need_their_windows_alone() -> None:
    made = parts(model=KVLayout(2, 2, head_dim=8, block_size=4, windows=(0, 6)))
    add(made, range(12), [0])
    add(made, range(12, 20))
    assert made.gap() == ""  # layer 1 has tokens 12 to 19, its window is 14 to 19


def test_the_gap_of_a_window_is_seen() -> None:
    made = parts(model=KVLayout(2, 2, head_dim=8, block_size=4, windows=(0, 6)))
    add(made, layers=[0])
    add(made, range(15, 20), [1])
    assert made.gap() == "token 14 of layer 1"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tokens": range(21)}, r"tokens range\(0, 21\) of request 'r', which is range\(0, 20\)"),
        ({"tokens": range(0, 20, 2)}, "push tokens of it"),
        ({"blocks": [0, 1]}, r"tokens 0 to 19 of layer 0 .* not within range\(0, 8\)"),
        ({"blocks": BlockTable(BLOCKS, 4)}, r"not within range\(4, 36\)"),
        ({"blocks": [0.5]}, "integers"),
        ({"layers": [4]}, "this rank holds 0 to 3"),
        ({"layers": [-1]}, "this rank holds 0 to 3"),
    ],
)
def test_what_is_not_of_the_request_is_refused(change: dict[str, Any], text: str) -> None:
    made = parts()
    with pytest.raises(InvalidUsage, match=text):
        add(made, **change)
    assert not made.parts
    assert made.gap() == "token 0 of layer 0"
