"""The completion board: slots that are handed out, waited on, given back and withdrawn."""

import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec
import pytest

from kvxfer import _core
from kvxfer.errors import InvalidUsage, NotAvailable, PeerLost, ProtocolMismatch, RegistrationError
from kvxfer.memory import create_segment
from kvxfer.transport import Board
from kvxfer.transport import board as board_module
from kvxfer.transport.board import NUM_SLOTS, PeerSlot

GUARD_S = 60.0


def waits(board: Board, slot: int, sequence: int) -> bool:
    return board.wait(slot, sequence, timeout_s=0.0)


def test_a_signal_is_seen_on_its_own_slot_alone() -> None:
    board = Board()
    slots = [board.take_slot() for _ in range(3)]
    assert len(set(slots)) == 3
    peers = [PeerSlot(board.describe(slot)) for slot in slots]
    assert [peer.slot for peer in peers] == slots
    peers[1].signal(peers[1].next_sequence())
    assert [waits(board, slot, 1) for slot in slots] == [False, True, False]
    assert waits(board, slots[1], 0)
    assert not waits(board, slots[1], 2)


def test_a_later_sequence_stands_for_the_earlier_ones() -> None:
    board = Board()
    slot = board.take_slot()
    peer = PeerSlot(board.describe(slot))
    for _ in range(4):
        last = peer.next_sequence()
    peer.signal(last)
    assert last == 4
    assert [waits(board, slot, sequence) for sequence in range(6)] == [True] * 5 + [False]


def test_there_are_so_many_slots_and_no_more() -> None:
    board = Board()
    slots = [board.take_slot() for _ in range(NUM_SLOTS)]
    assert sorted(slots) == list(range(NUM_SLOTS))
    with pytest.raises(NotAvailable, match=f"{NUM_SLOTS} peers are linked, which is the limit"):
        board.take_slot()
    board.give_back(17)
    assert board.take_slot() == 17


def test_a_slot_forgets_the_peer_that_had_it() -> None:
    board = Board()
    slot = board.take_slot()
    old = PeerSlot(board.describe(slot))
    for _ in range(5):
        old.signal(old.next_sequence())
    board.give_back(slot)
    assert board.take_slot() == slot
    assert not waits(board, slot, 1)
    new = PeerSlot(board.describe(slot))
    assert new.next_sequence() == 1


def test_a_withdrawn_board_refuses_every_peer() -> None:
    board = Board()
    peers = [PeerSlot(board.describe(board.take_slot())) for _ in range(2)]
    for peer in peers:
        peer.require_open()
    board.withdraw()
    board.withdraw()
    peers.append(PeerSlot(board.describe(board.take_slot())))
    for peer in peers:
        with pytest.raises(PeerLost, match="has closed the cache of this link; connect again"):
            peer.require_open()
    # The last slot's own number is not touched by it, nor is it a peer's slot.
    assert not any(waits(board, peer.slot, 1) for peer in peers)


def test_a_waiter_wakes_for_the_signal_and_not_before() -> None:
    board = Board()
    slot = board.take_slot()
    peer = PeerSlot(board.describe(slot))
    told: list[bool] = []
    waiter = threading.Thread(
        target=lambda: told.append(board.wait(slot, 1, timeout_s=float("inf"))), daemon=True
    )
    waiter.start()
    waiter.join(0.3)  # longer than one slice of the wait
    assert waiter.is_alive()
    peer.signal(peer.next_sequence())
    waiter.join(GUARD_S)
    assert told == [True]


def test_the_board_outlives_its_owner_for_as_long_as_a_peer_has_it() -> None:
    board = Board()
    peer = PeerSlot(board.describe(board.take_slot()))
    del board
    peer.signal(peer.next_sequence())


def change(description: bytes, **fields: object) -> bytes:
    tree = msgspec.msgpack.decode(description) | fields
    return msgspec.msgpack.encode(tree)


WRONG: dict[str, Callable[[bytes], bytes]] = {
    "a slot that is not a peer's": lambda data: change(data, slot=NUM_SLOTS),
    "a negative slot": lambda data: change(data, slot=-1),
    "no bytes": lambda data: change(data, num_bytes=0),
    "fewer bytes than slots": lambda data: change(data, num_bytes=NUM_SLOTS * 64),
    "too many bytes": lambda data: change(data, num_bytes=1 << 40),
    "a negative descriptor": lambda data: change(data, fd=-1),
    "cut short": lambda data: data[:-1],
    "nothing": lambda data: b"",
    "a list": lambda data: b"\x90",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_description_is_refused(name: str) -> None:
    board = Board()
    wrong = WRONG[name](board.describe(board.take_slot()))
    with pytest.raises(ProtocolMismatch, match=f"{len(wrong)} bytes are not the metadata of a"):
        PeerSlot(wrong)


def test_another_size_or_segment_than_the_real_one_is_refused() -> None:
    board = Board()
    description = board.describe(board.take_slot())
    with pytest.raises(RegistrationError, match=f"the peer says {1 << 20}"):
        PeerSlot(change(description, num_bytes=1 << 20))
    # A segment too short for all slots: what lies behind its end is not read.
    short = create_segment(1)
    fields = {"fd": short.fd, "num_bytes": short.num_bytes}
    with pytest.raises(ProtocolMismatch, match="are not the metadata of a"):
        PeerSlot(change(description, **fields))


@pytest.mark.parametrize(("address", "num_slots"), [(0, 1), (4096 + 8, 1), (64, 0)])
def test_flags_of_a_place_that_cannot_hold_them_are_refused(address: int, num_slots: int) -> None:
    with pytest.raises(InvalidUsage, match="completion board"):
        _core.CompletionBoard(address, num_slots)


def test_a_slot_outside_the_board_is_refused() -> None:
    segment = create_segment(1)
    flags = _core.CompletionBoard(segment.address, 4)
    calls: list[Callable[[int], object]] = [
        flags.slot_address,
        flags.load,
        lambda slot: flags.signal(slot, 1),
        lambda slot: flags.wait(slot, 1, 0.0),
    ]
    for call in calls:
        with pytest.raises(InvalidUsage, match="completion slot 4 of a board of 4"):
            call(4)


def test_a_full_board_takes_back_the_slots_of_the_dead() -> None:
    board = Board()
    for _ in range(NUM_SLOTS):
        slot = board.take_slot()
    program = (
        "import sys; from kvxfer.transport.board import PeerSlot; "
        "PeerSlot(bytes.fromhex(sys.argv[1]))"
    )
    command = [sys.executable, "-c", program, board.describe(slot).hex()]
    subprocess.run(command, check=True, timeout=GUARD_S, cwd="/")
    alive = PeerSlot(board.describe(3))
    assert board.take_slot() == slot
    with pytest.raises(NotAvailable, match="which is the limit"):
        board.take_slot()
    assert alive.slot == 3


def test_a_full_board_takes_back_what_was_never_opened_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board = Board()
    slots = [board.take_slot() for _ in range(NUM_SLOTS)]
    opened = [PeerSlot(board.describe(slot)) for slot in slots[1:]]
    with pytest.raises(NotAvailable, match="which is the limit"):
        board.take_slot()
    monkeypatch.setattr(board_module, "_OPEN_WITHIN_S", 0.0)
    assert board.take_slot() == slots[0]
    PeerSlot(board.describe(slots[0]))
    with pytest.raises(NotAvailable, match="which is the limit"):
        board.take_slot()
    assert len(opened) == NUM_SLOTS - 1


def test_a_full_board_takes_back_no_more_than_it_hands_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board = Board()
    for _ in range(NUM_SLOTS):
        board.take_slot()
    monkeypatch.setattr(board_module, "_OPEN_WITHIN_S", 0.0)
    board.take_slot()
    assert not board.has_free_slot


def test_a_number_that_was_given_back_comes_again() -> None:
    board = Board()
    peer = PeerSlot(board.describe(board.take_slot()))
    assert peer.next_sequence() == 1
    assert peer.next_sequence() == 2
    peer.give_back_sequence()
    assert peer.sequence == 1
    assert peer.next_sequence() == 2
