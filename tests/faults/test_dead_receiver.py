"""A receiver that dies, comes back, hangs or is cut off: its sender ends, or finds it again."""

import os
import signal

import pytest
from peer_process import ChildProcess, RemoteError, RemotePeer
from session_sides import (
    RECEIVER_SEED,
    check_received,
    child,
    here,
    meet,
    open_receiver,
    open_sender,
    ports_of,
    sides,
)
from waiting import eventually

from kvxfer.errors import ControlTimeout

BLOCKS = [3, 1, 7]


def begin(sender: RemotePeer, addresses: dict[str, str], request_id: str = "r-1") -> None:
    sender.call("send_layers", request_id=request_id, block_ids=BLOCKS, to=addresses)
    sender.call("layer", request_id=request_id, layer=0)


def wait_for_grant(receiver: RemotePeer) -> None:
    eventually(lambda: receiver.call("num_free") < 16, "the request was never granted")


def received(receiver: RemotePeer, name: str) -> list[int]:
    notice = receiver.call("notice")
    assert notice["ok"], notice
    assert notice["request_id"] == name
    assert receiver.call("notice", timeout_s=0.1) is None
    return list(notice["block_ids"])


def test_a_receiver_killed_mid_transfer_fails_the_request() -> None:
    with sides(child(), here()) as (receiver, sender):
        assert isinstance(receiver, ChildProcess)
        to = open_receiver(receiver)
        open_sender(sender)
        meet(sender, (receiver, to))
        sender.call("limit", connect_s=1.0)
        begin(sender, to)
        wait_for_grant(receiver)
        receiver.kill()
        with pytest.raises(Exception, match=r"tcp://|process"):
            sender.call("wait", request_id="r-1")
        assert sender.call("done", request_id="r-1")


@pytest.mark.parametrize("memory", ["shared", "private"])
def test_a_restarted_receiver_gets_the_request_from_the_start(memory: str) -> None:
    with sides(child(), child(), here()) as (receiver, successor, sender):
        assert isinstance(receiver, ChildProcess)
        to = open_receiver(receiver, memory=memory)
        open_sender(sender, memory=memory)
        begin(sender, to)
        wait_for_grant(receiver)
        receiver.kill()
        receiver.reap()
        assert open_receiver(successor, memory=memory, ports=ports_of(to)) == to
        wait_for_grant(successor)
        sender.call("layer", request_id="r-1", layer=1)
        sender.call("wait", request_id="r-1")
        got = received(successor, "r-1")
        check_received(successor, BLOCKS, got)


def test_a_receiver_that_restarts_between_two_requests_is_found_again() -> None:
    with sides(here()) as (sender,):
        open_sender(sender)
        ports = None
        for turn in range(4):
            with child() as receiver:
                to = open_receiver(receiver, seed=5 + turn, ports=ports)
                assert ports in (None, ports_of(to))
                ports = ports_of(to)
                name = f"r-{turn}"
                sender.call("send", request_id=name, block_ids=BLOCKS, to=to)
                sender.call("wait", request_id=name)
                got = received(receiver, name)
                check_received(receiver, BLOCKS, got, dst_seed=5 + turn)
                receiver.kill()


def test_memory_that_is_registered_anew_at_the_same_addresses_is_seen() -> None:
    with sides(child(), here()) as (receiver, sender):
        to = open_receiver(receiver)
        open_sender(sender)
        sender.call("send", request_id="r-1", block_ids=BLOCKS, to=to)
        sender.call("wait", request_id="r-1")
        received(receiver, "r-1")
        # The same process frees its cache, registers another and serves it on the same ports.
        receiver.call("close")
        open_receiver(receiver, seed=8, ports=ports_of(to))
        sender.call("send", request_id="r-2", block_ids=BLOCKS, to=to)
        sender.call("wait", request_id="r-2")
        check_received(receiver, BLOCKS, received(receiver, "r-2"), dst_seed=8)


def test_a_stopped_receiver_fails_the_request_and_works_again_once_it_goes_on() -> None:
    with sides(child(), here()) as (receiver, sender):
        assert isinstance(receiver, ChildProcess)
        to = open_receiver(receiver)
        open_sender(sender, limits={"silent_s": 5.0})
        meet(sender, (receiver, to))
        sender.call("limit", connect_s=1.0, move_s=2.0, commit_s=2.0)
        begin(sender, to)
        wait_for_grant(receiver)
        os.kill(receiver.pid, signal.SIGSTOP)
        try:
            with pytest.raises(Exception, match=r"r-1|tcp://"):
                sender.call("wait", request_id="r-1")
            sender.call("send", request_id="hung", block_ids=BLOCKS, to=to)
            with pytest.raises(Exception, match="tcp://"):
                sender.call("wait", request_id="hung")
        finally:
            os.kill(receiver.pid, signal.SIGCONT)
        notice = receiver.call("notice")
        assert (notice["request_id"], notice["ok"]) == ("r-1", False)
        sender.call("limit", connect_s=60.0, move_s=60.0, commit_s=60.0)
        sender.call("send", request_id="r-2", block_ids=BLOCKS, to=to)
        sender.call("wait", request_id="r-2")
        while (notice := receiver.call("notice"))["request_id"] == "hung":
            assert not notice["ok"]
        assert (notice["request_id"], notice["ok"]) == ("r-2", True)
        eventually(lambda: receiver.call("num_free") == 13, "blocks are missing")


def test_a_receiver_that_stood_still_for_a_moment_is_named_as_the_cause() -> None:
    with sides(child(), here()) as (receiver, sender):
        assert isinstance(receiver, ChildProcess)
        to = open_receiver(receiver)
        open_sender(sender, limits={"silent_s": 5.0})
        begin(sender, to)
        wait_for_grant(receiver)
        os.kill(receiver.pid, signal.SIGSTOP)
        try:
            eventually(lambda: _is_lost(sender), "its silence was not noticed")
        finally:
            os.kill(receiver.pid, signal.SIGCONT)
        # It lives, so it has ended the request itself, and refuses its id.
        with pytest.raises(ControlTimeout, match=r"WatchRequest .*sent anew, the receiver refused"):
            sender.call("wait", request_id="r-1")
        assert not receiver.call("notice")["ok"]


def _is_lost(sender: RemotePeer) -> bool:
    (target,) = sender.host.sender._targets.values()  # type: ignore[attr-defined]
    return target.is_lost or target._peer is None


def test_a_dead_receiver_fails_its_own_requests_alone() -> None:
    with sides(child(), child(), here()) as (dead, alive, sender):
        assert isinstance(dead, ChildProcess)
        to_dead, to_alive = open_receiver(dead), open_receiver(alive)
        open_sender(sender)
        meet(sender, (dead, to_dead), (alive, to_alive))
        sender.call("limit", connect_s=1.0)
        dead.kill()
        sender.call("send", request_id="to-dead", block_ids=BLOCKS, to=to_dead)
        for turn in range(5):
            sender.call("send", request_id=f"r-{turn}", block_ids=BLOCKS, to=to_alive)
            sender.call("wait", request_id=f"r-{turn}")
            received(alive, f"r-{turn}")
        with pytest.raises(Exception, match=r"tcp://|process"):
            sender.call("wait", request_id="to-dead")


def test_one_dead_rank_fails_the_request_and_frees_the_others() -> None:
    with sides(child(), child(), here()) as (dead, alive, sender):
        assert isinstance(dead, ChildProcess)
        addresses = [open_receiver(dead), open_receiver(alive)]
        open_sender(sender)
        meet(sender, (dead, addresses[0]), (alive, addresses[1]))
        sender.call("limit", connect_s=1.0)
        sender.call("send_layers", request_id="r-1", block_ids=BLOCKS, to=addresses)
        sender.call("layer", request_id="r-1", layer=0)
        wait_for_grant(dead)
        wait_for_grant(alive)
        dead.kill()
        with pytest.raises(Exception, match=r"tcp://|process"):
            sender.call("wait", request_id="r-1")
        notice = alive.call("notice")
        assert not notice["ok"]
        assert not notice["quarantined"]
        assert alive.call("num_free") == 16


def test_a_receiver_that_closes_its_cache_is_a_clear_error() -> None:
    with sides(child(), here()) as (receiver, sender):
        to = open_receiver(receiver, seed=RECEIVER_SEED)
        open_sender(sender)
        sender.call("send", request_id="r-1", block_ids=BLOCKS, to=to)
        sender.call("wait", request_id="r-1")
        receiver.call("close_cache")
        sender.call("send", request_id="r-2", block_ids=BLOCKS, to=to)
        with pytest.raises(Exception, match="no longer registered"):
            sender.call("wait", request_id="r-2")


def test_a_child_reports_what_its_sender_raises() -> None:
    # The other direction: the sender in the child, the receiver dead before it was met.
    with sides(child(), child()) as (receiver, sender):
        assert isinstance(receiver, ChildProcess)
        to = open_receiver(receiver)
        receiver.kill()
        open_sender(sender, limits={"connect_s": 0.5})
        sender.call("send", request_id="r-1", block_ids=BLOCKS, to=to)
        with pytest.raises(RemoteError, match="tcp://") as caught:
            sender.call("wait", request_id="r-1")
        assert caught.value.kind == "ControlTimeout"
