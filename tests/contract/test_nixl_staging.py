"""How `nixl` works its slots where copies end by themselves, as kernels do.

Both sides are in this process and copy with `LateCopies`: everything but the GPU is real.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from cache_content import shape
from late_copies import NEVER, LateCopies
from nixl_strangers import answers, hello, region_of, stranger
from peer_process import InThisProcess
from transport_pairs import NIXL, Pair, linked, require_available

from kvxfer.errors import CudaError, PeerLost, TransferFailed
from kvxfer.layout import CopyPlan
from kvxfer.transport import Op, Tuning
from kvxfer.transport.nixl import pieces, staging, wire
from kvxfer.transport.nixl.staging import Place, SlotShape
from kvxfer.transport.nixl.wire import Kind, Message

STAGED = Tuning(engine="staged")
CACHE = shape(num_layers=4, num_kv_heads=4, head_dim=64, block_size=16, num_blocks=64)
IDS = np.random.default_rng(5).permutation(CACHE.num_blocks).tolist()
SLOT_BYTES = 1 << 17


@dataclass
class Sides:
    """A linked pair and what copies on either side of its first connection."""

    pair: Pair
    near: LateCopies
    far: LateCopies

    def move(self, op: Op) -> None:
        post = self.pair.peer.put if op is Op.PUT else self.pair.peer.get
        post(IDS, IDS[::-1], tuning=STAGED)

    def check(self, op: Op) -> None:
        near, far = CACHE.content(1), CACHE.content(2)
        if op is Op.PUT:
            self.pair.check_both(remote=CACHE.copied(near, far, IDS, IDS[::-1]))
        else:
            self.pair.check_both(local=CACHE.copied(far, near, IDS, IDS[::-1]))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[LateCopies]:
    """All copies of both sides: the far one's first, since it is asked to connect."""
    found: list[LateCopies] = []

    def make(num_threads: int) -> LateCopies:
        found.append(LateCopies(num_threads))
        return found[-1]

    monkeypatch.setattr(staging, "HostCopies", make)
    monkeypatch.setitem(staging.SHAPES, Place.HOST, SlotShape(4, SLOT_BYTES))
    return found


@pytest.fixture
def sides(made: list[LateCopies], monkeypatch: pytest.MonkeyPatch) -> Iterator[Sides]:
    require_available(NIXL)
    monkeypatch.setattr(pieces, "_LEAST_BYTES", SLOT_BYTES)
    with linked(NIXL, InThisProcess(), CACHE) as pair:
        far, near = made
        yield Sides(pair, near, far)


@pytest.mark.parametrize("op", Op, ids=lambda op: op.value)
def test_several_slots_are_under_way_and_the_bytes_are_right(sides: Sides, op: Op) -> None:
    sides.move(op)
    sides.check(op)
    sides.move(op)
    sides.check(op)
    assert (sides.near if op is Op.PUT else sides.far).most > 1
    assert sides.near.num_drained == sides.far.num_drained == 0


@pytest.mark.parametrize("side", ["near", "far"])
@pytest.mark.parametrize("op", Op, ids=lambda op: op.value)
def test_a_copy_that_is_said_to_be_over_too_early_is_seen(sides: Sides, op: Op, side: str) -> None:
    getattr(sides, side).lies = True
    sides.move(op)
    with pytest.raises(AssertionError):
        sides.check(op)


@pytest.mark.parametrize("op", Op, ids=lambda op: op.value)
def test_a_gpu_that_fails_at_the_peer_fails_the_transfer(sides: Sides, op: Op) -> None:
    sides.far.error = CudaError("an illegal address was met")
    with pytest.raises(TransferFailed, match=r"the GPU of process \d+: an illegal address"):
        sides.move(op)
    with pytest.raises(PeerLost, match="connect again"):
        sides.move(op)


@pytest.mark.parametrize("op", Op, ids=lambda op: op.value)
def test_a_gpu_that_fails_here_fails_the_transfer(sides: Sides, op: Op) -> None:
    sides.near.error = CudaError("an illegal address was met")
    with pytest.raises(CudaError):
        sides.move(op)
    with pytest.raises(PeerLost, match="connect again"):
        sides.move(op)


def fail_at(sides: Sides, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the far side refuse the piece of that number."""
    decode: Callable[..., Any] = pieces.decode_half
    seen = [0]

    def refuse(data: bytes, *, source: bool) -> Any:
        seen[0] += 1
        if seen[0] == number:
            raise TransferFailed("refused by the test")
        return decode(data, source=source)

    monkeypatch.setattr(pieces, "decode_half", refuse)


@pytest.mark.parametrize("op", Op, ids=lambda op: op.value)
def test_no_copy_is_under_way_once_a_failure_is_heard_of(
    sides: Sides, op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides.far.num_looks = NEVER
    fail_at(sides, 3, monkeypatch)
    with pytest.raises(TransferFailed, match="refused by the test"):
        sides.move(op)
    assert sides.far.num_drained == 2
    assert not sides.far._waiting
    assert not sides.near._waiting


def test_this_sides_copies_end_before_a_failure_is_raised(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = sides.pair.peer.link._staged_rows._write  # type: ignore[attr-defined]
    written = []

    def write_once(slot: Any) -> None:
        sides.near.num_looks = NEVER  # the pieces behind the first are still gathered
        written.append(slot.index)
        send(slot)

    monkeypatch.setattr(sides.pair.peer.link._staged_rows, "_write", write_once)  # type: ignore[attr-defined]
    fail_at(sides, 1, monkeypatch)
    with pytest.raises(TransferFailed, match="refused by the test"):
        sides.move(Op.PUT)
    assert written
    assert sides.near.num_drained > 0


def test_a_slot_that_the_peer_has_yet_to_empty_is_waited_for(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    link: Any = sides.pair.peer.link
    write, written = link._staged_rows._write, []

    def write_once(slot: Any) -> None:
        if written:
            raise CudaError("raised by the test")
        written.append(slot.index)
        write(slot)

    sides.far.num_looks = NEVER
    monkeypatch.setattr(link._staged_rows, "_write", write_once)
    with pytest.raises(CudaError, match="raised by the test"):
        sides.move(Op.PUT)
    given_up = link.given_up
    assert given_up is not None
    assert not given_up.poll(0.0)
    sides.far.num_looks = 0
    with pytest.raises(TransferFailed, match="was given up"):
        given_up.wait()
    assert sides.far.num_drained == 0
    link.close()


# Messages that no link of ours sends.


def half_of(pair: Pair, *, source: bool = False) -> bytes:
    """Half a piece that moves 64 bytes of the far side's pages."""
    address = int(pair.peer.link.region_addresses[0])
    plan = CopyPlan.contiguous(address, address, 64)
    (piece,) = pieces.cut(plan, plan.boxes, SLOT_BYTES)
    return pieces.encode_half(piece, source=source)


@pytest.mark.parametrize("second", ["the end", "the same slot again"])
def test_a_peer_cannot_end_or_overtake_its_own_copies(
    sides: Sides, made: list[LateCopies], second: str
) -> None:
    region, _ = region_of(sides.pair)
    key = b"k" * wire.ID_BYTES
    with stranger(region) as agent:
        talk = [Message(key, Kind.HELLO, body=hello(agent, region))]
        talk += [Message(key, Kind.BEGIN, number=1)]
        talk += [Message(key, Kind.SCATTER, 0, 1, half_of(sides.pair))]
        agent.send(region["agent"], talk[0])
        assert [one.kind for one in answers(agent, key, 1)] == [Kind.WELCOME]
        late = made[-1]
        late.num_looks = NEVER
        for message in talk[1:]:
            agent.send(region["agent"], message)
        assert [one.kind for one in answers(agent, key, 1)] == [Kind.GO]
        wrong = Message(key, Kind.FINISH, number=1) if second == "the end" else talk[2]
        agent.send(region["agent"], wrong)
        (failure,) = answers(agent, key, 1)
        assert failure.kind is Kind.FAIL
        assert msgspec.msgpack.decode(failure.body)["error"] == "ProtocolMismatch"
        assert late.num_drained == 1
        # What comes now is of a transfer that was refused, and touches no page.
        agent.send(region["agent"], talk[2])
        assert answers(agent, key) == []
    sides.move(Op.PUT)


def test_a_stranger_that_hits_anothers_connection_does_not_end_its_transfer(sides: Sides) -> None:
    region, _ = region_of(sides.pair)
    talk: Any = sides.pair.peer.link._talk  # type: ignore[attr-defined]
    ask = talk.ask

    def ask_beside_a_stranger(kind: Kind, expect: Kind, number: int) -> Message:
        answer: Message = ask(kind, expect, number)
        if kind is Kind.BEGIN:
            with stranger(region) as agent:
                body = hello(agent, region)
                agent.send(region["agent"], Message(talk.key, Kind.HELLO, body=body))
                assert Kind.WELCOME not in [one.kind for one in answers(agent, talk.key)]
        return answer

    talk.ask = ask_beside_a_stranger
    sides.move(Op.PUT)
    sides.check(Op.PUT)
