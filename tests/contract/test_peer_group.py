"""All ranks of the other side as one: what is refused before, what is waited for after."""

from collections.abc import Iterator
from typing import Any

import pytest
from small_servers import HALVES, Server, layout, serving

from kvxfer import PeerGroup
from kvxfer.errors import (
    InvalidUsage,
    KvxferError,
    LayoutMismatch,
    PeerLost,
    TransferTimeout,
)
from kvxfer.session import GroupTransfer
from kvxfer.transport import Transfer


@pytest.mark.usefixtures("heard_leaves")
def test_of_a_group_that_fails_none_stays_connected() -> None:
    with (
        serving(layout()) as near,
        serving(layout()) as good,
        serving(layout(head_dim=16)) as bad,
    ):
        with pytest.raises(LayoutMismatch):
            near.connect_all([good.addresses, bad.addresses])
        # The name is free again, so the connection is closed.
        with near.connect_all([good.addresses, good.addresses]) as group:
            names = [peer.connection for peer in group.peers]
            assert names == [near.incarnation, f"{near.incarnation}#2"]


Group = tuple[PeerGroup, list[Server]]


@pytest.fixture
def group() -> Iterator[Group]:
    """One rank, connected to the two halves of another cache of the model."""
    with (
        serving(layout()) as near,
        serving(layout(), HALVES[0]) as one,
        serving(layout(), HALVES[1]) as other,
        near.connect_all([one.addresses, other.addresses]) as peers,
    ):
        yield peers, [one, other]


def test_a_post_that_fails_midway_waits_for_what_was_posted(group: Group) -> None:
    peers, servers = group
    waited: list[float] = []
    link: Any = peers.peers[0].link
    post = link.post

    def noted(*args: Any, **options: Any) -> Any:
        transfer = post(*args, **options)
        transfer.wait = waited.append
        return transfer

    link.post = noted
    servers[1].cache.close()
    with pytest.raises(PeerLost, match="has closed the cache"):
        peers.put([0], [0])
    assert len(waited) == 1


@pytest.mark.parametrize("count", [1, 3])
def test_block_tables_of_another_number_than_ranks_are_refused(group: Group, count: int) -> None:
    with pytest.raises(InvalidUsage, match=f"{count} block tables for 2 ranks; give one for all"):
        group[0].put([0], [[0]] * count)


def test_wrong_blocks_for_one_rank_post_to_none(group: Group) -> None:
    peers, servers = group
    with pytest.raises(InvalidUsage, match=r"dst_block_ids\[0\] is 8"):
        peers.put([0], [[0], [8]])
    assert not servers[0].wait(peers.peers[0].connection, 1, timeout_s=0.0)


class OneOf(Transfer):
    """A transfer that a test completes, or lets fail."""

    def __init__(self, *, done: bool = True, error: KvxferError | None = None) -> None:
        self.num_bytes, self.actual_path, self.sequence = 7, "nowhere", 1
        self.done, self.error = done, error
        self.num_polls = 0

    def poll(self, timeout_s: float) -> bool:
        self.num_polls += 1
        if self.error is not None:
            raise self.error
        return self.done


def test_a_group_is_done_when_all_are() -> None:
    one, other = OneOf(), OneOf(done=False)
    both = GroupTransfer([one, other])
    assert both.num_bytes == 14
    assert not both.poll(0.0)
    with pytest.raises(TransferTimeout, match="7 bytes over nowhere were not complete"):
        both.wait(0.0)
    other.done = True
    assert both.poll(0.0)
    both.wait(0.0)
    assert GroupTransfer([]).poll(0.0)


def test_the_others_are_waited_for_where_one_fails() -> None:
    failed, other = OneOf(error=PeerLost("gone")), OneOf()
    with pytest.raises(PeerLost, match="gone"):
        GroupTransfer([failed, other]).wait(1.0)
    assert other.num_polls == 1


def test_what_may_still_be_written_is_told_before_what_failed() -> None:
    failed, late = OneOf(error=PeerLost("gone")), OneOf(done=False)
    with pytest.raises(TransferTimeout, match="were not complete"):
        GroupTransfer([failed, late]).wait(0.0)


def test_a_group_half_of_which_was_posted_and_does_not_end_says_so(group: Group) -> None:
    peers, servers = group

    class Endless(OneOf):
        def wait(self, timeout_s: float = 30.0) -> None:
            super().wait(0.0)

    link: Any = peers.peers[0].link
    link.post = lambda *args, **more: Endless(done=False)
    servers[1].cache.close()
    with pytest.raises(TransferTimeout, match="were not complete") as info:
        peers.put([0], [0])
    assert isinstance(info.value.__cause__, PeerLost)


def test_closing_a_group_closes_all_even_where_one_cannot_be(group: Group) -> None:
    peers, _ = group
    first: Any = peers.peers[0]
    close = first.close

    def stuck() -> None:
        raise TransferTimeout("in flight")

    first.close = stuck
    with pytest.raises(TransferTimeout, match="in flight"):
        peers.close()
    first.close = close
    with pytest.raises(InvalidUsage, match="this link is closed"):
        peers.peers[1].put([0], [0])
    assert first.put([0], [0]).num_bytes > 0
