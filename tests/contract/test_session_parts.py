"""Requests that are sent part by part: chunks of tokens, layers, and block tables that grow."""

import threading
from typing import Any

import pytest
from session_sides import ports_of
from sessions import Session, session, signs_of_life, with_args
from waiting import eventually

from kvxfer.errors import InvalidUsage, KvxferError, TransferFailed
from kvxfer.layout import BlockTable
from kvxfer.session import Receiver, SendHandle
from kvxfer.transport.host_copy import HostLink

__all__ = ["session"]  # the fixture

BLOCKS = [3, 1, 7, 12]  # 16 tokens
TOKENS = range(14)
CHUNKS = [range(5), range(5, 6), range(6, 14)]


def begin(session: Session, name: str = "r-1", tokens: range = TOKENS, **args: Any) -> SendHandle:
    handle: SendHandle = session.sender.begin(name, to=session.to, tokens=tokens, **args)
    return handle


def blocks_until(token: int) -> list[int]:
    """The blocks that an engine has given the request by the time that it computes a token."""
    return BLOCKS[: -(-token // 4)]


def check_tokens(session: Session, notice: Any, tokens: range = TOKENS) -> None:
    """Every byte over there, where ``tokens`` of the request came into the notice's blocks."""
    cache = session.far.shape
    expected, src = cache.content(2), cache.content(1)
    for token in tokens:
        here, slot = BLOCKS[token // 4], slice(token % 4 * 32, token % 4 * 32 + 32)
        there = notice.block_ids[token // 4 - notice.first_token // 4]
        cache.pages(expected)[:, :, there, slot] = cache.pages(src)[:, :, here, slot]
    assert (session.far.content() == expected).all()


def wait_for_bytes(session: Session, before: Any) -> None:
    eventually(lambda: (session.far.content() != before).any(), "bytes arrive")


def test_chunks_of_layers_arrive_as_one_request(session: Session) -> None:
    handle = begin(session)
    for chunk in CHUNKS:
        before = session.far.content()
        for layer in (1, 0):
            handle.push(blocks_until(chunk.stop), tokens=chunk, layers=[layer])
        wait_for_bytes(session, before)
        assert not handle.poll(0.02)
        assert session.receiver.poll(0.0) is None
    handle.finish()
    handle.wait(20.0)
    notice = session.notice()
    assert notice.ok
    assert handle.num_bytes == len(TOKENS) * 4 * 32
    check_tokens(session, notice)


def test_blocks_are_reserved_before_there_is_anything_to_send(session: Session) -> None:
    handle = begin(session)
    eventually(lambda: session.receiver.num_free_blocks == 12, "the blocks are reserved")
    handle.push(BLOCKS)
    handle.finish()
    handle.wait(20.0)
    check_tokens(session, session.notice())


def test_a_table_is_kept_as_it_was_when_it_was_pushed(session: Session) -> None:
    blocks = list(BLOCKS)
    handle = begin(session)
    handle.push(blocks)
    blocks[:] = [0] * 4
    handle.finish()
    handle.wait(20.0)
    check_tokens(session, session.notice())


@with_args({"scheduler": "later"})
def test_parts_are_clipped_to_what_the_receiver_lacks(session: Session) -> None:
    handle = begin(session)
    handle.push(BLOCKS, tokens=range(3))  # all of it is over there already
    handle.push(BLOCKS, tokens=range(3, 10))
    host = session.host(session.far)
    eventually(lambda: "r-1" in host.deferred, "the scheduler is asked")
    assert host.grant("r-1", [9, 4], first_token=8)
    handle.push(BlockTable(BLOCKS[2:], 8), tokens=range(10, 14))
    handle.finish()
    handle.wait(20.0)
    assert handle.num_bytes == 6 * 4 * 32
    check_tokens(session, session.notice(), range(8, 14))


@with_args({"scheduler": "later"})
def test_a_receiver_that_has_everything_is_told_all_the_same(session: Session) -> None:
    handle = begin(session)
    for layer in range(2):
        handle.push(BLOCKS, layers=[layer])
    handle.finish()
    host = session.host(session.far)
    eventually(lambda: "r-1" in host.deferred, "the scheduler is asked")
    assert host.grant("r-1", [], first_token=16)
    handle.wait(20.0)
    assert session.notice().ok
    assert (handle.num_bytes, handle.actual_path) == (0, "")


def test_a_sender_whose_copies_block_is_not_silent(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    post, signs = HostLink.post, signs_of_life(session, monkeypatch)

    def blocking(link: HostLink, *args: Any, **kwargs: Any) -> Any:
        num_signs = len(signs)
        eventually(lambda: len(signs) > num_signs, "the sender is silent")
        return post(link, *args, **kwargs)

    monkeypatch.setattr(HostLink, "post", blocking)
    handle = begin(session)
    for layer in range(2):
        handle.push(BLOCKS, layers=[layer])
    handle.finish()
    handle.wait(20.0)
    check_tokens(session, session.notice())


def test_a_request_of_no_tokens_is_told(session: Session) -> None:
    handle = begin(session, tokens=range(0))
    handle.finish()
    handle.wait(20.0)
    assert session.notice().ok


@pytest.mark.parametrize(
    ("pushed", "gap"),
    [
        ([], "token 0 of layer 0"),
        ([{"layers": [0]}], "token 0 of layer 1"),
        ([{"tokens": range(9)}, {"tokens": range(10, 14)}], "token 9 of layer 0"),
    ],
)
def test_a_request_with_a_gap_is_cancelled(
    session: Session, pushed: list[dict[str, Any]], gap: str
) -> None:
    handle = begin(session)
    for part in pushed:
        handle.push(BLOCKS, **part)
    eventually(lambda: session.receiver.num_free_blocks == 12, "the blocks are reserved")
    with pytest.raises(InvalidUsage, match=f"'r-1' was finished without {gap}; push every"):
        handle.finish()
    with pytest.raises(TransferFailed, match=gap):
        handle.wait(20.0)
    notice = session.notice()
    assert not notice.ok
    assert gap in notice.reason
    assert session.receiver.num_free_blocks == 16


def test_a_part_that_was_sent_before_is_refused_and_the_rest_goes_on(session: Session) -> None:
    handle = begin(session)
    handle.push(BLOCKS, tokens=range(8))
    with pytest.raises(InvalidUsage, match=r"tokens 0 to 7 of layer 0 .* were sent before"):
        handle.push(BLOCKS, tokens=range(7, 14))
    with pytest.raises(InvalidUsage, match="after=0 with host memory"):
        handle.push(BLOCKS, tokens=range(8, 14), after=0)
    handle.push(BLOCKS, tokens=range(8, 14))
    handle.finish()
    with pytest.raises(InvalidUsage, match="'r-1' is finished"):
        handle.push(BLOCKS)
    handle.wait(20.0)
    check_tokens(session, session.notice())


def test_what_comes_after_the_end_changes_nothing(session: Session) -> None:
    handle = begin(session)
    handle.cancel()
    with pytest.raises(TransferFailed, match="'r-1' was cancelled"):
        handle.wait(20.0)
    handle.push(BLOCKS)
    handle.finish()
    with pytest.raises(TransferFailed, match="'r-1' was cancelled"):
        handle.poll()


def test_the_end_is_told_once_well_or_not(session: Session) -> None:
    ends: list[str] = []
    good, bad = begin(session, "good"), begin(session, "bad")
    told = threading.Event()
    good.on_end(lambda: ends.append("good"))
    bad.on_end(lambda: (ends.append("bad"), 1 / 0))  # its own fault: logged, and nothing else
    bad.on_end(told.set)
    good.push(BLOCKS)
    good.finish()
    good.wait(20.0)
    bad.cancel()
    assert told.wait(20.0)
    assert sorted(ends) == ["bad", "good"]
    good.on_end(lambda: ends.append("late"))
    assert ends[-1] == "late"
    assert len(ends) == 3
    session.send("another").wait(20.0)


def test_two_requests_may_be_pushed_in_turns(session: Session) -> None:
    handles = {name: begin(session, name) for name in ("a", "b")}
    for chunk in CHUNKS:
        for handle in handles.values():
            handle.push(blocks_until(chunk.stop), tokens=chunk)
    for handle in handles.values():
        handle.finish()
    for handle in handles.values():
        handle.wait(20.0)
    got = {notice.request_id: notice.block_ids for notice in (session.notice(), session.notice())}
    assert got.keys() == handles.keys()


def test_parts_are_sent_again_to_a_receiver_that_comes_back(session: Session) -> None:
    handle = begin(session)
    handle.push(BLOCKS, tokens=range(9))
    wait_for_bytes(session, session.far.shape.content(2))
    far = session.host(session.far)
    far.receiver.close()
    far.fill(2)  # what had arrived is lost
    far.receiver = Receiver(far.cache, transport="loopback", ports=ports_of(session.to))
    handle.push(BLOCKS, tokens=range(9, 14))
    handle.finish()
    handle.wait(20.0)
    notice = session.notice()
    assert notice.ok
    check_tokens(session, notice)


def test_a_link_that_is_full_is_left_until_it_is_not(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostLink, "is_full", True)
    waiting, other = begin(session), begin(session, "r-2")
    waiting.push(BLOCKS, tokens=range(9))
    other.push(BLOCKS)
    other.finish()
    eventually(lambda: session.receiver.num_free_blocks == 8, "both have their blocks")
    other.cancel()  # which is heard, though the first one's copies are due
    with pytest.raises(TransferFailed, match="'r-2' was cancelled"):
        other.wait(20.0)
    assert (session.far.content() == session.far.shape.content(2)).all()
    assert session.receiver.poll(20.0).request_id == "r-2"
    monkeypatch.setattr(HostLink, "is_full", False)
    waiting.push(BLOCKS, tokens=range(9, 14))
    waiting.finish()
    waiting.wait(20.0)
    check_tokens(session, session.notice())


def test_internals_are_not_in_the_way_of_a_reader() -> None:
    public = {name for name in dir(SendHandle) if not name.startswith("_")}
    assert public == {
        "actual_path", "cancel", "done", "finish", "num_bytes", "on_end", "poll", "push", "wait",
    }  # fmt: skip


def test_layers_of_a_request_of_no_tokens_are_counted_too(session: Session) -> None:
    handle = session.sender.send_layers("r-1", [], to=session.to)
    handle.layer(0)
    with pytest.raises(InvalidUsage, match="layer 0 of request 'r-1' was sent before"):
        handle.layer(0)
    handle.layer(1)
    handle.wait(20.0)
    assert session.notice().ok


def test_wrong_tokens_are_refused_before_anything_is_on_its_way(session: Session) -> None:
    for tokens in (range(0, 8, 2), range(-1, 3), range(1 << 70, (1 << 70) + 1)):
        with pytest.raises(KvxferError, match="use a range of step 1, from 0 on"):
            begin(session, tokens=tokens)
    assert session.sender.num_open == 0
