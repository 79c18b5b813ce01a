"""A sender and a receiver that both live: what arrives, and what each side is told."""

import asyncio
import threading
import time
from typing import Any

import pytest
from cache_content import check_content, shape
from session_sides import check_received
from sessions import BLOCKS, Session, session, with_args

from kvxfer.errors import InvalidUsage, KvxferError, NotAvailable, TransferFailed
from kvxfer.layout import BlockTable
from kvxfer.session import Endpoint, SendHandle

__all__ = ["session"]  # the fixture


def test_a_request_arrives_and_both_sides_are_told_once(session: Session) -> None:
    handle = session.send()
    handle.wait(20.0)
    notice = session.notice()
    assert notice.ok
    assert (notice.request_id, notice.tokens, notice.first_token) == ("r-1", range(12), 0)
    assert notice.failed_block_ids == ()
    assert handle.num_bytes == 3 * 4 * 128
    check_received(session.far, BLOCKS, list(notice.block_ids))
    assert session.receiver.poll(0.1) is None
    assert session.receiver.num_free_blocks == 13
    session.receiver.release("r-1")
    session.receiver.release("r-1")
    assert session.receiver.num_free_blocks == 16
    assert session.sender.num_open == 0


@pytest.mark.parametrize(("blocks", "num_tokens"), [([], 0), ([2], 1), ([2, 9], 5), ([2, 9], 8)])
def test_empty_and_tiny_requests_are_told_once_too(
    session: Session, blocks: list[int], num_tokens: int
) -> None:
    for turn in range(3):
        handle = session.send(f"r-{turn}", blocks, tokens=range(num_tokens))
        handle.wait(20.0)
        notice = session.notice()
        assert notice.ok
        assert len(notice.block_ids) == -(-num_tokens // 4)
        assert handle.num_bytes == num_tokens * 4 * 32
        assert session.receiver.poll(0.05) is None


def test_tokens_from_the_middle_land_in_their_slots(session: Session) -> None:
    session.send(blocks=BlockTable([5, 6], 8), tokens=range(10, 14)).wait(20.0)
    notice = session.notice()
    assert (notice.tokens, notice.first_token, len(notice.block_ids)) == (range(10, 14), 8, 2)
    cache = session.far.shape
    expected, src = cache.content(2), cache.content(1)
    for block, got, slots in ((5, notice.block_ids[0], (2, 3)), (6, notice.block_ids[1], (0, 1))):
        for slot in slots:
            part = slice(slot * 32, slot * 32 + 32)
            cache.pages(expected)[:, :, got, part] = cache.pages(src)[:, :, block, part]
    check_content(cache, session.far.content(), expected)


def test_layers_are_sent_as_they_become_ready(session: Session) -> None:
    handle = session.sender.send_layers("r-1", BLOCKS, to=session.to)
    handle.layer(1)
    with pytest.raises(InvalidUsage, match="layer 1 of request 'r-1' was sent before"):
        handle.layer(1)
    with pytest.raises(InvalidUsage, match="layer 2"):
        handle.layer(2)
    cache = session.far.shape
    end_s = time.monotonic() + 20.0
    while handle.num_bytes == 0 and not _has_layer(session, 1):
        assert time.monotonic() < end_s
        time.sleep(0.001)
    # The bytes of the layer are there; the request is not, and nobody says that it is.
    assert not handle.poll(0.05)
    assert session.receiver.poll(0.0) is None
    handle.layer(0)
    handle.wait(20.0)
    notice = session.notice()
    assert notice.ok
    check_received(session.far, BLOCKS, list(notice.block_ids))
    assert handle.num_bytes == 3 * cache.num_planes * cache.page_bytes


def _has_layer(session: Session, layer: int) -> bool:
    cache = session.far.shape
    planes = slice(2 * layer, 2 * layer + 2)
    found = cache.pages(session.far.content())[0, planes]
    return bool((found != cache.pages(cache.content(2))[0, planes]).any())


def test_a_request_can_be_awaited_beside_the_loop(session: Session) -> None:
    async def run() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        notice = asyncio.create_task(session.receiver.next_notice())
        handle = session.sender.send_layers("r-1", BLOCKS, to=session.to)
        sent = asyncio.create_task(_ended(handle))
        while ticks < 20:  # for ever, were the loop held up by either
            await asyncio.sleep(0.001)
        assert not notice.done()
        assert not sent.done()
        handle.layer(0)
        handle.layer(1)
        await asyncio.wait_for(sent, 20.0)
        assert (await asyncio.wait_for(notice, 20.0)).ok
        await asyncio.wait_for(_ended(handle), 20.0)  # again, once it has ended
        bad = session.send("r-1")
        with pytest.raises(NotAvailable, match="committed already"):
            await asyncio.wait_for(_ended(bad), 20.0)
        ticking.cancel()

    asyncio.run(run())


async def _ended(handle: SendHandle) -> None:
    await handle


def test_an_id_is_used_once(session: Session) -> None:
    session.send("r-1").wait(20.0)
    assert session.notice().ok
    with pytest.raises(NotAvailable, match="request 'r-1' is committed already; use a new id"):
        session.send("r-1").wait(20.0)
    assert session.receiver.poll(0.05) is None
    assert session.receiver.num_free_blocks == 13
    handle = session.sender.send_layers("r-2", BLOCKS, to=session.to)
    with pytest.raises(InvalidUsage, match="'r-2' is on its way"):
        session.send("r-2")
    handle.cancel()
    with pytest.raises(TransferFailed, match="cancelled"):
        handle.wait(20.0)


def test_a_cancelled_request_fails_on_both_sides(session: Session) -> None:
    handle = session.sender.send_layers("r-1", BLOCKS, to=session.to)
    handle.layer(0)
    while session.receiver.num_free_blocks == 16:
        time.sleep(0.001)
    handle.cancel()
    with pytest.raises(TransferFailed, match="'r-1' was cancelled"):
        handle.wait(20.0)
    notice = session.notice()
    assert not notice.ok
    assert "its sender aborted" in notice.reason
    assert notice.failed_block_ids == notice.block_ids
    assert not notice.quarantined
    assert session.receiver.num_free_blocks == 16


@with_args({"limits": {"drain_s": 30.0}})
def test_a_request_that_the_engine_aborts_waits_for_its_sender(session: Session) -> None:
    handle = session.sender.send_layers("r-1", BLOCKS, to=session.to)
    handle.layer(0)
    while session.receiver.num_free_blocks == 16:
        time.sleep(0.001)
    with pytest.raises(InvalidUsage, match="still written to"):
        session.receiver.release("r-1")
    session.receiver.abort("r-1", "the client went away")
    # The sender is told, though it waits for a layer, and has let go by the time of the notice.
    with pytest.raises(TransferFailed, match="the client went away"):
        handle.wait(20.0)
    notice = session.notice()
    assert (notice.ok, notice.quarantined) == (False, False)
    assert session.receiver.num_free_blocks == 16


@with_args({"limits": {"receive_s": 0.3, "drain_s": 30.0}})
def test_a_reservation_expires_and_its_sender_is_told(session: Session) -> None:
    handle = session.sender.send_layers("r-1", BLOCKS, to=session.to)
    handle.layer(0)
    with pytest.raises(TransferFailed, match="it was receiving for too long"):
        handle.wait(20.0)
    assert "too long" in session.notice().reason
    assert session.receiver.num_free_blocks == 16


@with_args({"limits": {"receive_s": 0.2, "drain_s": 0.2}})
def test_blocks_in_quarantine_come_back_when_the_sender_is_heard(session: Session) -> None:
    # A peer without a sender: nobody tells it to stop.
    cache = session.host(session.near).cache
    with (
        Endpoint(cache, transport="loopback") as near,
        near.connect(session.to) as peer,
    ):
        blocks = peer.reserve("r-1", 3)
        notice = session.notice()
        assert notice.quarantined
        assert session.receiver.num_free_blocks == 13
        peer.put(BLOCKS, blocks).wait()
        with pytest.raises(TransferFailed, match="too long"):
            peer.commit("r-1")
        assert session.receiver.num_free_blocks == 16
        assert session.host(session.far).freed == [("r-1", notice.block_ids)]
        assert session.receiver.poll(0.05) is None


def test_two_requests_that_each_hold_half_cannot_be(session: Session) -> None:
    # Three quarters of the pool each: one at a time, and both are served.
    handles = [session.send(f"r-{turn}", list(range(12))) for turn in range(4)]
    for _ in handles:
        notice = session.notice()
        assert notice.ok
        session.receiver.release(notice.request_id)
    for handle in handles:
        handle.wait(20.0)
    assert session.receiver.num_free_blocks == 16


def test_a_large_request_is_not_passed_by_small_ones(session: Session) -> None:
    session.send("holder", list(range(8))).wait(20.0)
    assert session.notice().request_id == "holder"
    large = session.send("large", list(range(12)))
    while session.receiver.num_open == 0:
        time.sleep(0.001)
    small = [session.send(f"small-{turn}", [0]) for turn in range(3)]
    assert session.receiver.poll(0.1) is None
    session.receiver.release("holder")
    assert session.notice().request_id == "large"
    for handle in (large, *small):
        handle.wait(20.0)


def test_a_request_for_more_than_the_cache_is_refused(session: Session) -> None:
    with pytest.raises(NotAvailable, match="17 blocks of a cache of 16: it can never be served"):
        session.send(blocks=[0] * 17).wait(20.0)
    assert session.receiver.poll(0.05) is None


@with_args({"cache": shape(block_size=8)})
def test_other_block_sizes_meet(session: Session) -> None:
    session.send(tokens=range(10)).wait(20.0)
    assert len(session.notice().block_ids) == 2


@with_args({"cache": shape(head_dim=16)})
def test_layouts_that_do_not_fit_fail_the_request_with_the_field(session: Session) -> None:
    with pytest.raises(KvxferError, match="head_dim"):
        session.send().wait(20.0)


def test_one_thread_serves_each_side_and_one_posts_to_a_peer() -> None:
    before = set(threading.enumerate())
    session = Session({}, {})
    handles = [session.send(f"r-{turn}", [turn]) for turn in range(8)]
    for handle in handles:
        handle.wait(20.0)
    assert len(set(threading.enumerate()) - before) == 3
    session.close()
    assert not set(threading.enumerate()) - before


def test_a_closed_sender_fails_what_was_on_its_way(session: Session) -> None:
    handle = session.sender.send_layers("r-1", BLOCKS, to=session.to)
    handle.layer(0)
    while session.receiver.num_free_blocks == 16:
        time.sleep(0.001)
    session.sender.close()
    session.sender.close()
    with pytest.raises(TransferFailed, match="'r-1' was cancelled"):
        handle.poll()
    assert not session.notice().ok
    assert session.receiver.num_free_blocks == 16
    with pytest.raises(InvalidUsage, match="this sender is closed"):
        session.send("r-2")


def test_a_closed_receiver_ends_its_requests(session: Session) -> None:
    handle = session.sender.send_layers("r-1", BLOCKS, to=session.to)
    handle.layer(0)
    while session.receiver.num_open == 0:
        time.sleep(0.001)
    session.receiver.close()
    notice = session.notice()
    assert "closed" in notice.reason
    assert session.receiver.poll(0.0) is None
    handle.cancel()
    with pytest.raises(KvxferError):
        handle.wait(20.0)


@with_args({}, {"limits": {"num_requests": 2}})
def test_a_full_sender_says_so_at_once(session: Session) -> None:
    handles = [session.sender.send_layers(name, [0], to=session.to) for name in ("a", "b")]
    with pytest.raises(NotAvailable, match="2 requests are on their way"):
        session.send("c")
    for handle in handles:
        handle.cancel()


@with_args({"limits": {"num_requests": 2}})
def test_a_full_receiver_lets_requests_wait(session: Session) -> None:
    handles = [session.send(f"r-{turn}", [turn]) for turn in range(5)]
    for _ in handles:
        assert session.notice().ok
    for handle in handles:
        handle.wait(20.0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"to": {"init": "tcp://127.0.0.1:1"}}, "alloc"),
        ({"to": []}, "at least one"),
        ({"tokens": range(13)}, "not within"),
        ({"tokens": range(0, 8, 2)}, "use a range of step 1"),
        ({"tokens": range(-4, 8)}, "from 0 on"),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    session: Session, change: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidUsage, match=text):
        session.sender.send("r-1", BLOCKS, **({"to": session.to} | change))
    assert session.sender.num_open == 0
