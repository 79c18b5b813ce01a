"""Requests between caches whose layers form groups, each side with groups of its own."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cache_content import private_array
from group_cases import GroupCase, GroupSide
from kv_oracle import Blocks, compare
from mutations import mutate
from waiting import eventually

from kvxfer import KVCache
from kvxfer.control import ReserveReply, TableSpec, decode, encode
from kvxfer.errors import InvalidUsage, KvxferError, ProtocolMismatch
from kvxfer.layout import BlockTable, BlockTables
from kvxfer.session import Endpoint, Granted, Notice, Offer, Receiver, Sender
from kvxfer.session.poster import Poster
from kvxfer.session.reception import Reception
from kvxfer.session.way import Way

WINDOWS = (0, 6, 0, 6)
TOKENS = range(1, 21)  # windows begin at token 14
NUM_BLOCKS = 16
# Two layers of each group in one place, as an engine with one pool of pages keeps them.
GROUPED = GroupSide(
    (0, 1, 0, 1),
    (0, 0, 1, 1),
    (Blocks((7, 2, 9, 4, 11, 1), 0, 4), Blocks((3, 8, 5), 12, 4)),
    "packed",
    "nhd",
    NUM_BLOCKS,
    num_heads=2,
)
FLAT = replace(
    GROUPED,
    groups=(0,) * 4,
    slots=(0, 1, 2, 3),
    tables=(Blocks((6, 3, 0, 8), 0, 6),),
    kind="split",
)
THREE = replace(
    GROUPED,
    groups=(2, 1, 2, 0),
    slots=(1, 0, 0, 0),
    tables=(Blocks((5, 1), 9, 6), Blocks((2, 0), 12, 6), Blocks((3, 7, 4, 6), 0, 6)),
)


class Sides:
    """Caches of two sides in this process, and a sender and a receiver on them."""

    def __init__(self, src: GroupSide, dst: GroupSide, **receiver: Any) -> None:
        self.case = GroupCase(WINDOWS, src, dst, TOKENS, TOKENS.stop)
        self.stack = ExitStack()
        self.src = self._memory(src, self.case.source_bytes())
        self.dst = self._memory(dst, dst.cache.fresh(0xEEEE))
        self.near, self.far = self._cache(src, self.src), self._cache(dst, self.dst)
        self.receiver = self.stack.enter_context(
            Receiver(self.far, transport="loopback", num_threads=1, **receiver)
        )
        self.sender = self.stack.enter_context(
            Sender(self.near, transport="loopback", num_threads=1)
        )

    @staticmethod
    def _memory(side: GroupSide, content: Any) -> Any:
        memory = private_array(content.size)
        memory[:] = content
        return memory

    def _cache(self, side: GroupSide, memory: Any) -> KVCache:
        places = np.split(memory, max(side.slots) + 1)
        arrays = [places[slot] for slot in side.slots]
        return self.stack.enter_context(KVCache(side.layout(WINDOWS), arrays))

    def send(self) -> Any:
        tables = self.case.src.block_tables()
        return self.sender.send("r", tables, to=self.receiver.addresses, tokens=TOKENS)

    def check(self, notice: Notice | None) -> None:
        """Every byte over there, in the blocks of the notice."""
        assert notice is not None
        assert notice.ok, notice.reason
        size = self.case.dst.block_size
        tables = tuple(
            Blocks(tuple(one.block_ids.tolist()), one.first_token, size) for one in notice.tables
        )
        case = replace(self.case, dst=replace(self.case.dst, tables=tables))
        compare(case.dst.cache, self.dst, case.expected_bytes())


Open = Callable[..., Sides]


@pytest.fixture
def open_sides() -> Iterator[Open]:
    opened: list[Sides] = []

    def make(*args: Any, **receiver: Any) -> Sides:
        opened.append(Sides(*args, **receiver))
        return opened[-1]

    yield make
    for one in opened:
        one.stack.close()


PAIRS = pytest.mark.parametrize(
    ("src", "dst"),
    [(GROUPED, GROUPED), (GROUPED, FLAT), (FLAT, GROUPED), (GROUPED, THREE), (THREE, GROUPED)],
    ids=["same", "to one", "from one", "to others", "from others"],
)


@PAIRS
def test_a_request_goes_by_the_groups_of_both_sides(
    open_sides: Open, src: GroupSide, dst: GroupSide
) -> None:
    sides = open_sides(src, dst)
    handle = sides.send()
    handle.wait(20.0)
    notice = sides.receiver.poll(20.0)
    sides.check(notice)
    assert notice is not None
    assert len(set(notice.block_ids)) == len(notice.block_ids)
    assert [one.first_token for one in notice.tables] == [
        blocks.start * dst.block_size for blocks in sides.far.layout.needed_blocks(TOKENS)
    ]
    assert sides.receiver.num_free_blocks == NUM_BLOCKS - len(notice.block_ids)
    sides.receiver.release("r")
    assert sides.receiver.num_free_blocks == NUM_BLOCKS
    # What slides moves its window alone: 6 tokens of 2 layers, 20 of the others.
    assert handle.num_bytes == (2 * 20 + 2 * 6) * sides.far.layout.bytes_per_token_per_layer


@PAIRS
def test_chunks_bring_the_tables_of_their_time(
    open_sides: Open, src: GroupSide, dst: GroupSide
) -> None:
    sides = open_sides(src, dst)
    handle = sides.sender.begin("r", to=sides.receiver.addresses, tokens=TOKENS)
    for chunk in (range(1, 9), range(9, 16), range(16, 21)):
        tables = BlockTables(_until(one, chunk.stop) for one in src.tables)
        for layer in (2, 0, 3, 1):
            handle.push(tables, tokens=chunk, layers=[layer])
    handle.finish()
    handle.wait(20.0)
    sides.check(sides.receiver.poll(20.0))


def _until(table: Blocks, token: int) -> BlockTable:
    num_blocks = max(-(-(token - table.first_token) // table.block_size), 0)
    return BlockTable(table.ids[:num_blocks], table.first_token)


def test_each_group_may_have_its_own_beginning_already(open_sides: Open) -> None:
    offers: list[Offer] = []

    def place(offer: Offer) -> Granted:
        offers.append(offer)
        return Granted([[10, 3, 5], [0]], [12, 20])

    sides = open_sides(FLAT, GROUPED, on_reserve=place)
    handle = sides.send()
    handle.wait(20.0)
    (offer,) = offers
    assert offer.blocks == (range(6), range(3, 6))
    assert offer.num_blocks == 9
    notice = sides.receiver.poll(20.0)
    sides.check(notice)
    assert notice is not None
    assert notice.block_ids == (10, 3, 5, 0)
    assert handle.num_bytes == (2 * 9 + 2 * 1) * sides.far.layout.bytes_per_token_per_layer


FITTING: list[Any] = [[10, 3, 1, 2, 4, 5], [0, 6, 7]]


@pytest.mark.parametrize(
    ("granted", "text"),
    [
        (Granted([10, 3, 1, 2, 4, 5]), "1 block tables for 2 groups of layers"),
        (Granted(FITTING, [0]), "2 lists of block ids with 1 first tokens"),
        (Granted([*FITTING, []], [0, 12, 0]), "3 block tables for 2 groups"),
        (Granted(FITTING, [0, 13]), "3 blocks from token 13 .* group 1; give 3 blocks of 4"),
        (Granted(FITTING, [0, 8]), "3 blocks from token 8 .* give 4 blocks .* token 12 or later"),
        (Granted([FITTING[0], [0, 6]], [0, 12]), "2 blocks from token 12 .* give 3 blocks"),
        (Granted([FITTING[0], [0, 6, 10]], [0, 12]), "repeat or are outside 0 to 15"),
        (Granted([FITTING[0], [0, 6, 16]], [0, 12]), "repeat or are outside 0 to 15"),
        (Granted([FITTING[0], [0, 6, -1]], [0, 12]), "repeat or are outside 0 to 15"),
        (FITTING[0], "6 lists of block ids with 2 first tokens"),
    ],
)
def test_a_grant_that_does_not_fit_is_refused(open_sides: Open, granted: Any, text: str) -> None:
    sides = open_sides(FLAT, GROUPED, on_reserve=lambda offer: granted)
    with pytest.raises(KvxferError, match=text):
        sides.send().wait(20.0)
    notice = sides.receiver.poll(20.0)
    assert notice is not None
    assert not notice.ok
    assert (notice.tables, notice.block_ids, notice.first_token) == ((), (), 0)


def test_a_list_a_group_is_an_answer_too(open_sides: Open) -> None:
    sides = open_sides(FLAT, GROUPED, on_reserve=lambda offer: FITTING)
    sides.send().wait(20.0)
    sides.check(sides.receiver.poll(20.0))


def test_a_block_that_is_written_for_one_group_is_given_to_none(open_sides: Open) -> None:
    sides = open_sides(FLAT, GROUPED, on_reserve=lambda offer: FITTING)
    first = sides.sender.begin("first", to=sides.receiver.addresses, tokens=TOKENS)
    eventually(lambda: sides.receiver.num_open == 1, "the first one has its blocks")
    with pytest.raises(KvxferError, match="block 0 for request 'r' may still be written"):
        sides.send().wait(20.0)
    first.cancel()
    with pytest.raises(KvxferError, match="cancelled"):
        first.wait(20.0)


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ([TableSpec([1])], "1 block tables for 2 groups"),
        ([TableSpec([10, 3, 1, 2, 4, 5]), TableSpec([0, 6, 7], 11)], "3 blocks from token 11"),
        ([TableSpec([10, 3, 1, 2, 4, 5]), TableSpec([0, 6], 12)], "2 blocks from token 12"),
        ([TableSpec([10, 3, 1, 2, 4, 5, 8]), TableSpec([0, 6, 7], 12)], "7 blocks from token 0"),
        ([TableSpec([10, 3, 1, 2, 4, 16]), TableSpec([0, 6, 7], 12)], "the last of its ids is 16"),
        ([TableSpec([]), TableSpec([], 1 << 62), TableSpec([])], "3 block tables for 2 groups"),
        ([TableSpec([1], (1 << 63) - 1), TableSpec([])], "1 blocks from token 9223372036854775807"),
    ],
)
def test_a_receiver_that_lies_is_not_written_to(
    open_sides: Open, monkeypatch: pytest.MonkeyPatch, tables: list[TableSpec], text: str
) -> None:
    sides = open_sides(FLAT, GROUPED)

    def lie(reception: Reception) -> ReserveReply:
        return ReserveReply(request_id="r", state="granted", tables=tables)

    monkeypatch.setattr(Reception, "reply", lie)
    with pytest.raises(ProtocolMismatch, match=text):
        sides.send().wait(20.0)
    assert (sides.dst == sides.case.dst.cache.fresh(0xEEEE)).all()


def test_a_spoiled_grant_is_refused_or_fits(open_sides: Open) -> None:
    sides = open_sides(FLAT, GROUPED)
    tables = [TableSpec([10, 3, 1, 2, 4, 5]), TableSpec([0, 6, 7], 12)]
    head, body = encode(ReserveReply(request_id="r", state="granted", tables=tables))
    outcomes: Counter[str] = Counter()
    random_ = random.Random(7)
    with (
        Endpoint(sides.near, transport="loopback") as near,
        near.connect(sides.receiver.addresses) as peer,
    ):
        for _ in range(3000):
            try:
                reply = decode([head, mutate(body, random_)], ReserveReply)
                if reply.state == "granted":
                    Way(peer, Poster(peer.link, lambda: None), TOKENS, reply)
                    ids = reply.block_ids
                    assert len(set(ids)) == len(ids)
                    assert max(ids, default=0) < NUM_BLOCKS
                    assert [len(one.block_ids) for one in reply.tables] == [
                        max(-(-(21 - one.first_token) // 4), 0) for one in reply.tables
                    ]
                outcomes[reply.state] += 1
            except KvxferError as error:
                outcomes[type(error).__name__] += 1
    assert outcomes.keys() <= {"granted", "wait", "refused", "ProtocolMismatch"}
    assert min(outcomes["granted"], outcomes["ProtocolMismatch"]) > 100, outcomes


def test_a_group_that_a_receiver_has_whole_may_begin_anywhere_behind(open_sides: Open) -> None:
    # Far behind what a table may begin with: it holds none.
    sides = open_sides(FLAT, GROUPED, on_reserve=lambda offer: Granted([[], [0]], [1 << 39, 20]))
    sides.send().wait(20.0)
    notice = sides.receiver.poll(20.0)
    assert notice is not None
    sides.check(replace(notice, tables=(BlockTable([], 24), notice.tables[1])))


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ([0, 1, 2, 3, 4, 5], "1 block tables for request 'r'; the layers form 2 groups"),
        (
            BlockTables([[0] * 6, [1] * 3]),
            r"tokens 15 to 20 of layer 1 .* are not within",
        ),
        (BlockTables([[0] * 5, [1] * 6]), "tokens 1 to 20 of layer 0"),
    ],
)
def test_tables_that_do_not_hold_a_group_are_refused_at_once(
    open_sides: Open, blocks: Any, text: str
) -> None:
    sides = open_sides(GROUPED, FLAT)
    with pytest.raises(InvalidUsage, match=text):
        sides.sender.send("r", blocks, to=sides.receiver.addresses, tokens=TOKENS)
    assert sides.sender.num_open == 0


def test_tables_of_groups_want_to_hear_which_tokens(open_sides: Open) -> None:
    sides = open_sides(GROUPED, FLAT)
    with pytest.raises(InvalidUsage, match="do not say which tokens"):
        sides.sender.send("r", GROUPED.block_tables(), to=sides.receiver.addresses)
