"""A far side that is sent what no link would send: it answers or drops, lives, and writes nothing.

What it is sent lies behind the secret that only its metadata tells, and is not believed either.
"""

import random
import socket
from collections.abc import Iterator

import numpy as np
import pytest
from cache_content import GUARD_BYTES, check_content, shape
from peer_process import ChildProcess
from transport_pairs import REMOTE_SEED, UCX, Pair, linked, require_available
from ucx_wire import FINISH, GET, HELLO, PIECE, PUT, SETTLE_S, Box, RawPeer, begin, piece, plan

from kvxfer import _core
from kvxfer.errors import InvalidUsage, KvxferError, PeerLost

NUM_MUTANTS = 150
ROW_BYTES = 64
NUM_ROWS = 8
SPAN_BYTES = 2 * ROW_BYTES * NUM_ROWS  # rows lie two of their lengths apart


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    require_available(UCX)
    with ChildProcess() as child, linked(UCX, child) as made:
        yield made


@pytest.fixture
def raw(pair: Pair) -> Iterator[RawPeer]:
    peer = RawPeer(pair)
    yield peer
    peer.drop()


def rows(address: int, **changes: int) -> bytes:
    """A plan of 8 rows of 64 bytes each, 128 bytes apart."""
    box = Box(ROW_BYTES, outer=(NUM_ROWS, 0, 2 * ROW_BYTES))
    for name, value in changes.items():
        setattr(box, name, value)
    return plan([address], [box])


DATA = b"\xee" * (ROW_BYTES * NUM_ROWS)


def check_untouched(pair: Pair, num_bytes: int = 0) -> None:
    """Every byte over there, the guards too; the first ``num_bytes`` of the region may differ."""
    expected = np.array(pair.remote.shape.content(REMOTE_SEED))
    found = np.array(pair.remote.content())
    region = slice(GUARD_BYTES, GUARD_BYTES + num_bytes)
    found[0, region] = expected[0, region]
    check_content(pair.remote.shape, found, expected)


def restore(pair: Pair) -> None:
    pair.remote.call("fill", seed=REMOTE_SEED)


def test_a_valid_transfer_by_hand_lands(pair: Pair, raw: RawPeer) -> None:
    # What the others spoil is right to begin with.
    address, _ = raw.regions[0]
    said = raw.send((PUT, begin(), rows(address)), (PIECE, piece(num_rows=NUM_ROWS), DATA))
    assert said == "done"
    check_untouched(pair, SPAN_BYTES)
    with pytest.raises(AssertionError, match="block 0"):
        check_untouched(pair)
    restore(pair)


def outside(raw: RawPeer) -> dict[str, bytes]:
    address, num_bytes = raw.regions[0]
    end = address + num_bytes
    huge = 1 << 62
    return {
        "before the region": rows(address - 1),
        "past its end": rows(end - SPAN_BYTES + ROW_BYTES + 1),
        "at the end": rows(end),
        "null": rows(0),
        "a wrap of the address": rows((1 << 64) - ROW_BYTES),
        "a wrap of the stride": rows(address, outer=(2, 0, (1 << 64) - 1)),
        "a wrap of the block": plan(
            [address], [Box(64, block_stride=1 << 40)], segments=[((1 << 32) - 1, 0)]
        ),
        "a long row": rows(address, run_bytes=num_bytes + 1),
        "an endless row": rows(address, run_bytes=huge * 3),
        "no row": rows(address, outer=(0, 0, 0)),
        "rows of nothing": rows(address, run_bytes=0),
        "planes it lacks": rows(address, num_planes=2),
        "segments it lacks": rows(address, first_segment=1),
        "a wrap of the counts": rows(address, first_plane=(1 << 32) - 1),
        "too many rows": rows(
            address, outer=((1 << 32) - 1, 0, 0), inner=((1 << 32) - 1, 0, 0), run_bytes=1 << 30
        ),
        "a conversion": plan([address], [Box(64)], scales=[1.0], conversion=1),
        "a scale it lacks": plan([address], [Box(64, first_scale=7)], scales=[1.0], conversion=1),
        "no such conversion": plan([address], [Box(64)], conversion=9),
        "a cut table": rows(address)[:-1],
        "nothing": b"",
        "counts without tables": b"\xff" * 24,
        "large tables looked at often": plan(
            [address], [Box(64, num_segments=1 << 17)] * 600, segments=[(0, 0)] * (1 << 17)
        ),
    }


def test_a_plan_that_leaves_the_regions_is_refused(pair: Pair, raw: RawPeer) -> None:
    for name, tables in outside(raw).items():
        # In the way of a sender that does not wait to be let.
        said = raw.send((PUT, begin(), tables), (PIECE, piece(num_rows=NUM_ROWS), DATA))
        assert said not in ("", "done"), name
        raw.drop()
        if name not in ("a conversion",):
            assert raw.send((GET, begin(), tables)) not in ("", "done"), name
        raw.drop()
    check_untouched(pair)


PIECES = {
    "no rows": (piece(num_rows=0), DATA),
    "rows past the box": (piece(first_row=1, num_rows=NUM_ROWS), DATA),
    "a wrap of the rows": (piece(first_row=(1 << 64) - 1, num_rows=2), DATA[:128]),
    "a box it lacks": (piece(box=1), DATA[:64]),
    "another transfer": (piece(transfer=2), DATA[:64]),
    "too long a row": (piece(), DATA[:65]),
    "past the row": (piece(first_byte=1), DATA[:64]),
    "a wrap of the row": (piece(first_byte=(1 << 64) - 1), DATA[:64]),
    "fewer bytes than rows": (piece(num_rows=NUM_ROWS), DATA[:-1]),
    "more bytes than rows": (piece(num_rows=NUM_ROWS), DATA * 2),
    "rows from the middle": (piece(num_rows=2, first_byte=1), DATA[:128]),
    "nothing": (piece(), b""),
    "a cut header": (piece()[:-1], DATA[:64]),
    "a large rendezvous": (piece(num_rows=NUM_ROWS), b"\xee" * (4 << 20)),
}


@pytest.mark.parametrize("name", PIECES)
def test_a_piece_that_is_not_in_its_plan_is_refused(pair: Pair, raw: RawPeer, name: str) -> None:
    address, _ = raw.regions[0]
    said = raw.send((PUT, begin(), rows(address)), (PIECE, *PIECES[name]))
    assert "TransferFailed" in said
    check_untouched(pair)


def test_a_piece_may_come_once(pair: Pair, raw: RawPeer) -> None:
    address, _ = raw.regions[0]
    half = (PIECE, piece(num_rows=NUM_ROWS // 2 + 1), DATA[: ROW_BYTES * (NUM_ROWS // 2 + 1)])
    assert "too many" in raw.send((PUT, begin(), rows(address)), half, half)
    check_untouched(pair, SPAN_BYTES)
    restore(pair)


UNDUE = {
    "a second hello": (HELLO, b"\0" * 32, b""),
    "a piece": (PIECE, piece(), DATA[:64]),
    "a finish": (FINISH, b"\0" * 8, b""),
    "a short header": (PUT, b"\0" * 7, b""),
    "a long header": (GET, b"\0" * 4096, b""),
}


@pytest.mark.parametrize("name", UNDUE)
def test_a_message_that_is_not_due_ends_the_connection(pair: Pair, raw: RawPeer, name: str) -> None:
    assert "TransferFailed" in raw.send(UNDUE[name])
    check_untouched(pair)


def test_a_second_transfer_before_the_first_has_ended_ends_both(pair: Pair, raw: RawPeer) -> None:
    address, _ = raw.regions[0]
    assert "not due" in raw.send((PUT, begin(), rows(address)), (PUT, begin(2), rows(address)))
    check_untouched(pair)


def test_nobody_is_let_in_without_the_secret(pair: Pair, raw: RawPeer) -> None:
    with pytest.raises(PeerLost, match="not what the metadata was made for"):
        raw.connect(secret=bytes(16))
    for slot in (64, 65, (1 << 32) - 1):  # the 65th says that the cache is closed
        with pytest.raises(KvxferError, match="completion slot"):
            raw.connect(slot=slot)
    pair.peer.put([0], [1])
    restore(pair)


def test_mutants_of_everything_leave_the_far_side_as_it_is(pair: Pair, raw: RawPeer) -> None:
    address, _ = raw.regions[0]
    right = (begin(), rows(address), piece(num_rows=NUM_ROWS), DATA)
    num_answers = 0
    for number in range(NUM_MUTANTS):
        random_ = random.Random(number)
        spoiled = list(right)
        # Tables that were flipped may be other valid ones, so only without data behind them.
        index = random_.randrange(3)
        spoiled[index] = flip(spoiled[index], random_)
        messages = [(PUT, spoiled[0], spoiled[1]), (PIECE, spoiled[2], spoiled[3])]
        sent = messages[: 1 if index == 1 else 2]
        num_answers += bool(raw.send(*sent, wait_s=SETTLE_S))
        raw.drop()
    assert num_answers > NUM_MUTANTS // 2
    check_untouched(pair, SPAN_BYTES)
    restore(pair)
    cache = pair.remote.shape
    pair.peer.put([1], [2])
    expected = cache.copied(cache.content(1), cache.content(REMOTE_SEED), [1], [2])
    check_content(cache, pair.remote.content(), expected)
    restore(pair)


def flip(data: bytes, random_: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(random_.choice((1, 2, 8))):
        out[random_.randrange(len(out))] ^= 1 << random_.randrange(8)
    return bytes(out)


def test_noise_on_the_port_is_survived(pair: Pair) -> None:
    port = RawPeer(pair)._server["port"]
    for number in range(20):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(random.Random(number).randbytes(1 << (number % 12)))
    cache = shape()
    pair.peer.put([3], [4])
    expected = cache.copied(cache.content(1), cache.content(REMOTE_SEED), [3], [4])
    check_content(cache, pair.remote.content(), expected)
    restore(pair)


def test_staging_of_another_kind_is_refused() -> None:
    with pytest.raises(InvalidUsage, match="staging 'device'; use host, pinned or rehearsal"):
        _core.UcxSettings(staging="device")
