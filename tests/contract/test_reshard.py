"""Every destination rank gets exactly its bytes, whichever parallel layouts meet.

The ranks of the side that copies are endpoints of this process; over shm each rank of the other
side is a process.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rank_host
from contract_cases import CASES
from peer_process import DEADLINE_S, ChildProcess, InThisProcess, RemotePeer
from rank_host import RankHost
from reshard_cases import Case
from transport_pairs import LOOPBACK, Kind, skip_without_attach

from kvxfer import BlockTable, PeerGroup
from kvxfer.errors import LayoutMismatch
from kvxfer.session import GroupTransfer, peer_group
from kvxfer.transport import Op

_PROGRAM = Path(rank_host.__file__)


class FarRanks:
    """Far sides that the tests of a module share; each test opens its own caches there."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._ranks: list[RemotePeer] = []

    def take(self, count: int) -> list[RemotePeer]:
        in_child = self._kind.in_two_processes
        while len(self._ranks) < count:
            self._ranks.append(ChildProcess(_PROGRAM) if in_child else InThisProcess(RankHost()))
        return self._ranks[:count]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


@dataclass(frozen=True)
class Meeting:
    """All ranks of both sides; those near copy, by ``op``."""

    case: Case
    op: Op
    near: list[RankHost]
    far: list[RemotePeer]
    groups: list[PeerGroup]

    def copy(self, near_rank: int) -> GroupTransfer:
        """What one near rank has to do."""
        case, group = self.case, self.groups[near_rank]
        post = group.put if self.op is Op.PUT else group.get
        transfer = post(case.src.table(), case.dst.table(), tokens=case.tokens, layers=case.layers)
        transfer.wait(DEADLINE_S)
        assert transfer.poll(0.0)
        return transfer

    def check(self, num_bytes: int) -> None:
        """Each byte that was to be written was, once, and nothing else on either side."""
        for where, ranks in (("near", map(InThisProcess, self.near)), ("far", self.far)):
            for number, rank in enumerate(ranks):
                problem = rank.call("problem")
                assert not problem, f"{where} rank {number}: {problem}"
        ranks = self.case.dst.ranks
        # Together with the right contents this leaves no byte that was written twice.
        assert num_bytes == sum(int(self.case.expected_writes(rank).sum()) for rank in ranks)


Meet = Callable[[str, Op], AbstractContextManager[Meeting]]


@pytest.fixture(scope="module")
def far_ranks(kind: Kind) -> Iterator[FarRanks]:
    ranks = FarRanks(kind)
    yield ranks
    ranks.close()


@pytest.fixture
def meet(kind: Kind, far_ranks: FarRanks) -> Meet:
    return partial(met, kind, far_ranks)


@contextmanager
def met(kind: Kind, far_ranks: FarRanks, name: str, op: Op) -> Iterator[Meeting]:
    """Open all ranks of a case, and connect each that copies to all of the other side."""
    case, near_is_source = CASES[name], op is Op.PUT
    sides = (case.src, case.dst) if near_is_source else (case.dst, case.src)
    how = {"case": name, "memory": kind.memory, "transport": kind.transport}
    with ExitStack() as stack:
        far, addresses = far_ranks.take(len(sides[1].ranks)), []
        for rank, host in enumerate(far):
            opened = host.call("open", rank=rank, is_source=not near_is_source, **how)
            stack.callback(host.release)
            addresses.append(opened["addresses"])
        near, groups = [], []
        for rank in sides[0].ranks:
            near.append(RankHost())
            stack.callback(near[-1].close)
            near[-1].open(rank=rank, is_source=near_is_source, **how)
            with skip_without_attach(kind):
                group = near[-1].endpoint.connect_all(addresses, convert=case.conversion)
            groups.append(stack.enter_context(group))
        yield Meeting(case, op, near, far, groups)


@pytest.mark.parametrize("op", Op, ids=lambda op: op.value)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_exactly_its_bytes(meet: Meet, name: str, op: Op) -> None:
    with meet(name, op) as meeting:
        transfers = [meeting.copy(rank) for rank in range(len(meeting.near))]
        meeting.check(sum(transfer.num_bytes for transfer in transfers))


@pytest.mark.parametrize("op", Op, ids=lambda op: op.value)
@pytest.mark.parametrize("name", ["blocks of 16 to 64, a part of them", "two layers"])
def test_peers_one_by_one_do_what_their_group_does(meet: Meet, name: str, op: Op) -> None:
    with meet(name, op) as meeting:
        case, num_bytes = meeting.case, 0
        for peer in (peer for group in meeting.groups for peer in group.peers):
            post = peer.put if op is Op.PUT else peer.get
            transfer = post(
                case.src.table(), case.dst.table(), tokens=case.tokens, layers=case.layers
            )
            transfer.wait(DEADLINE_S)
            num_bytes += transfer.num_bytes
        meeting.check(num_bytes)


@pytest.mark.parametrize("name", ["tp 3 to 2, heads cut", "pp 2 to 1", "fp8, a scale a layer"])
def test_the_check_sees_a_rank_that_did_not_send(meet: Meet, name: str) -> None:
    with meet(name, Op.PUT) as meeting:
        transfers = [meeting.copy(rank) for rank in range(1, len(meeting.near))]
        with pytest.raises(AssertionError, match=r"far rank \d: layer \d, K, block \d"):
            meeting.check(sum(transfer.num_bytes for transfer in transfers))


def test_the_check_sees_a_rank_that_sent_twice(meet: Meet) -> None:
    with meet("tp 1 to 2", Op.PUT) as meeting:
        num_bytes = meeting.copy(0).num_bytes + meeting.copy(0).num_bytes
        with pytest.raises(AssertionError, match=str(num_bytes)):
            meeting.check(num_bytes)


@pytest.mark.parametrize("kind", [LOOPBACK], indirect=True, ids=str)
def test_the_check_sees_a_stray_byte(meet: Meet) -> None:
    with meet("tp 1 to 2", Op.PUT) as meeting:
        num_bytes = meeting.copy(0).num_bytes
        raw = meeting.near[0].memory.raw
        for byte, message in (
            (0, "a guard was written"),
            (-1, "a guard"),
            (5000, "layer 0, K, bl"),
        ):
            raw[byte] ^= 1
            with pytest.raises(AssertionError, match=f"near rank 0: {message}"):
                meeting.check(num_bytes)
            raw[byte] ^= 1
        meeting.check(num_bytes)


def test_only_ranks_that_share_anything_are_posted_to_and_told(meet: Meet) -> None:
    with meet("pp 2 x tp 2 to uneven stages", Op.PUT) as meeting:
        for group in meeting.groups:
            transfer = group.put(
                meeting.case.src.table(), meeting.case.dst.table(), tokens=range(0)
            )
            # Told even of nothing, or a receiver that counts on this rank would wait for ever.
            assert transfer.num_bytes == 0
            taking_part = [bool(peer.shares(Op.PUT)) for peer in group.peers]
            assert len(transfer.transfers) == sum(taking_part)
            for peer, far, told in zip(group.peers, meeting.far, taking_part, strict=True):
                assert far.call("wait", connection=peer.connection, sequence=1) == told
        # The second stage of the source lies in that of the destination.
        assert [peer.shares(Op.PUT) == () for peer in meeting.groups[2].peers] == [True, False]


def test_shares_are_the_models_numbers_in_both_directions(meet: Meet) -> None:
    with meet("tp 3 to 2, heads cut", Op.PUT) as meeting:
        held: list[set[tuple[int, int]]] = [set(), set()]
        for group in meeting.groups:
            for peer, pairs in zip(group.peers, held, strict=True):
                for share in peer.shares(Op.PUT):
                    sent = {(layer, head) for layer in share.layers for head in share.heads}
                    assert not sent & pairs
                    pairs |= sent
        assert held == [
            {(layer, head) for layer in range(4) for head in heads} for heads in ((0, 1), (2, 3))
        ]
        one = meeting.groups[0].peers[0]
        assert one.view.shard.rank.tp_size == 2
        assert one.plan(Op.PUT, [0], [0]).num_pages > 0
        assert one.plan(Op.PUT, [0], [0], layers=[]).num_pages == 0


def test_each_rank_may_have_blocks_of_its_own(meet: Meet) -> None:
    with meet("tp 1 to 2", Op.PUT) as meeting:
        case, group = meeting.case, meeting.groups[0]
        ids = [list(case.dst.block_ids), list(reversed(case.dst.block_ids))]
        transfer = group.put(case.src.table(), [ids[0], BlockTable(ids[1])])
        transfer.wait(DEADLINE_S)
        # In the order of the case for the first rank, backwards for the second.
        assert not meeting.far[0].call("problem")
        assert "block" in meeting.far[1].call("problem")
        group.put(list(reversed(case.src.block_ids)), ids[1]).wait(DEADLINE_S)
        meeting.check(transfer.num_bytes)


@pytest.mark.parametrize("kind", [LOOPBACK], indirect=True, ids=str)
def test_block_tables_are_matched_once_for_all_ranks(
    meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    block_map = peer_group.BlockMap

    def counted(*args: Any, **options: Any) -> Any:
        made.append(args)
        return block_map(*args, **options)

    monkeypatch.setattr(peer_group, "BlockMap", counted)
    with meet("tp 4 to 3, heads held twice", Op.PUT) as meeting:
        group, ids = meeting.groups[1], [0, 1, 2]
        assert len(group.put(ids, ids).transfers) == 2
        assert len(made) == 1
        group.put(ids, [list(ids) for _ in group.peers])
        assert len(made) == 1 + 2


@pytest.mark.parametrize("kind", [LOOPBACK], indirect=True, ids=str)
def test_a_conversion_goes_one_way_alone(meet: Meet) -> None:
    with meet("fp8, a scale a layer", Op.PUT) as meeting:
        peer = meeting.groups[0].peers[0]
        with pytest.raises(LayoutMismatch, match="dtype is fp8_e4m3 at the source and bfloat16"):
            peer.get([0], [0])
        with pytest.raises(LayoutMismatch, match="dtype is fp8_e4m3 at the source and bfloat16"):
            meeting.groups[0].get([0], [0])
