"""The scheduler's tokens and blocks in those of a worker's cache."""

import pytest

from kvxfer.connectors.vllm.pages import Pages
from kvxfer.connectors.vllm.step import Table
from kvxfer.session import Offer

SIZE = 16
PLAIN_PAGES, WHOLE_PAGES = Pages(SIZE, ratio=2), Pages(1, 128, 1, "cpu-vec")


def test_tables_are_told_in_the_blocks_of_the_cache() -> None:
    (table,) = PLAIN_PAGES.source([Table((5, 7), 64)]).tables
    assert (table.block_ids.tolist(), table.first_token) == ([10, 11, 14, 15], 64)
    (table,) = WHOLE_PAGES.source([Table((5, 7), 256)]).tables
    assert (table.block_ids.tolist(), table.first_token) == ([5, 7], 2)


@pytest.mark.parametrize(
    ("tokens", "is_last", "units"),
    [
        ((0, 100), False, range(0)),
        ((100, 300), False, range(2)),
        ((300, 400), True, range(2, 4)),
        ((0, 128), True, range(1)),
        ((0, 129), True, range(2)),
    ],
)
def test_a_page_that_is_copied_whole_goes_once_it_is_full_or_the_last(
    tokens: tuple[int, int], is_last: bool, units: range
) -> None:
    assert WHOLE_PAGES.units_of(tokens, is_last=is_last) == units
    assert PLAIN_PAGES.units_of(tokens, is_last=is_last) == range(*tokens)


def test_a_window_is_as_many_pages_as_it_can_touch() -> None:
    for window in range(1, 400):
        ends = range(window, window + 128)
        touched = {len(range((end - window) // 128, -(-end // 128))) for end in ends}
        assert WHOLE_PAGES.windows(window) == max(touched)
        assert PLAIN_PAGES.windows(window) == window
    assert WHOLE_PAGES.windows(0) == 0


def test_a_grant_begins_where_the_decoder_holds_no_more() -> None:
    offer = Offer("r", range(100), (range(7),))  # 100 tokens in blocks of 16
    granted = PLAIN_PAGES.target([Table((4, 6, 8), 32)], offer)
    (table,) = granted.tables
    assert (table.block_ids.tolist(), table.first_token) == ([8, 9, 12, 13, 16], 32)


def test_a_grant_leaves_out_what_a_layer_does_not_need() -> None:
    offer = Offer("r", range(100), (range(7), range(5, 7)))
    granted = PLAIN_PAGES.target([Table((1, 2, 3, 4), 0), Table((11, 12, 13, 14), 0)], offer)
    assert [one.block_ids.tolist() for one in granted.tables] == [[2, 3, 4, 5, 6, 7, 8], [27, 28]]
    assert [one.first_token for one in granted.tables] == [0, 80]


def test_a_grant_of_nothing_has_no_blocks() -> None:
    (table,) = PLAIN_PAGES.target((), Offer("r", range(100), (range(7),))).tables
    assert (table.block_ids.size, table.first_token) == (0, 112)
