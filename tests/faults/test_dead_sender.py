"""A sender that dies or hangs: its receiver fails the request and gets its pages back."""

import os
import signal

import pytest
from leaks import check_flat, resources
from peer_process import ChildProcess, RemoteError, RemotePeer
from session_sides import check_received, child, here, open_receiver, open_sender, sides
from waiting import eventually


def begin(sender: RemotePeer, addresses: dict[str, str], request_id: str = "r-1") -> None:
    """Bring a request to where one of its two layers is written."""
    sender.call("send_layers", request_id=request_id, block_ids=[3, 1, 7], to=addresses)
    sender.call("layer", request_id=request_id, layer=0)


def wait_for_grant(receiver: RemotePeer) -> None:
    eventually(lambda: receiver.call("num_free") < 16, "the request was never granted")


def send_one(sender: RemotePeer, receiver: RemotePeer, to: dict[str, str], name: str) -> list[int]:
    sender.call("send", request_id=name, block_ids=[5, 2], to=to)
    sender.call("wait", request_id=name)
    notice = receiver.call("notice")
    assert notice["ok"], notice
    assert notice["request_id"] == name
    return list(notice["block_ids"])


def test_a_sender_killed_mid_transfer_fails_its_request() -> None:
    with sides(here(), child()) as (receiver, sender):
        assert isinstance(sender, ChildProcess)
        to = open_receiver(receiver)
        open_sender(sender)
        begin(sender, to)
        wait_for_grant(receiver)
        sender.kill()
        notice = receiver.call("notice")
        assert not notice["ok"]
        assert notice["request_id"] == "r-1"
        assert len(notice["failed_block_ids"]) == 3
        assert not notice["quarantined"]
        assert receiver.call("num_free") == 16
        assert receiver.call("notice", timeout_s=0.2) is None


def test_a_sender_that_comes_back_sends_again() -> None:
    with sides(here(), child(), child()) as (receiver, sender, successor):
        assert isinstance(sender, ChildProcess)
        to = open_receiver(receiver)
        open_sender(sender)
        begin(sender, to)
        wait_for_grant(receiver)
        sender.kill()
        assert not receiver.call("notice")["ok"]
        receiver.call("fill", seed=2)
        open_sender(successor)
        got = send_one(successor, receiver, to, "r-2")
        check_received(receiver, [5, 2], got)


def test_a_stopped_sender_fails_its_request_and_its_pages_stay_in_quarantine() -> None:
    with sides(here(), child(), child()) as (receiver, sender, other):
        assert isinstance(sender, ChildProcess)
        to = open_receiver(receiver, limits={"receive_s": 5.0, "drain_s": 0.5})
        open_sender(sender)
        open_sender(other)
        begin(sender, to)
        wait_for_grant(receiver)
        receiver.call("limit", receive_s=60.0)
        os.kill(sender.pid, signal.SIGSTOP)
        try:
            notice = receiver.call("notice")
            assert not notice["ok"]
            assert notice["quarantined"]
            held = set(notice["block_ids"])
            # Nobody else gets them while the stopped process could go on with its copy.
            assert receiver.call("num_free") == 13
            got = send_one(other, receiver, to, "r-2")
            assert not held & set(got)
            assert receiver.call("num_open") == 1
        finally:
            os.kill(sender.pid, signal.SIGCONT)
        eventually(lambda: receiver.call("num_open") == 0, "the quarantine never ended")
        assert receiver.call("num_free") == 14
        # The sender that went on learns how it ended, and can send again.
        sender.call("layer", request_id="r-1", layer=1)
        with pytest.raises(RemoteError, match="'r-1' has failed"):
            sender.call("wait", request_id="r-1")
        got = send_one(sender, receiver, to, "r-3")
        assert len(got) == 2


def test_a_stopped_sender_that_is_killed_gives_its_pages_back() -> None:
    with sides(here(), child()) as (receiver, sender):
        assert isinstance(sender, ChildProcess)
        to = open_receiver(receiver, limits={"receive_s": 5.0, "drain_s": 0.5})
        open_sender(sender)
        begin(sender, to)
        wait_for_grant(receiver)
        os.kill(sender.pid, signal.SIGSTOP)
        assert receiver.call("notice")["quarantined"]
        sender.kill()
        eventually(lambda: receiver.call("num_free") == 16, "the quarantine never ended")
        assert receiver.call("notice", timeout_s=0.2) is None


def test_a_dead_sender_leaves_the_requests_of_others_alone() -> None:
    with sides(here(), child(), child()) as (receiver, sender, other):
        assert isinstance(sender, ChildProcess)
        to = open_receiver(receiver)
        open_sender(sender)
        open_sender(other)
        begin(sender, to, "dies")
        begin(other, to, "lives")
        eventually(lambda: receiver.call("num_free") == 10, "not both were granted")
        sender.kill()
        assert receiver.call("notice")["request_id"] == "dies"
        other.call("layer", request_id="lives", layer=1)
        other.call("wait", request_id="lives")
        notice = receiver.call("notice")
        assert (notice["request_id"], notice["ok"]) == ("lives", True)
        assert receiver.call("num_free") == 13


def test_a_waiting_request_of_a_dead_sender_keeps_nobody_waiting() -> None:
    with sides(here(), child(), child()) as (receiver, sender, other):
        assert isinstance(sender, ChildProcess)
        to = open_receiver(receiver)
        open_sender(sender)
        open_sender(other)
        begin(other, to, "holder")
        wait_for_grant(receiver)
        sender.call("send", request_id="large", block_ids=list(range(16)), to=to)
        eventually(lambda: receiver.call("num_open") == 2, "the large one never came")
        sender.kill()
        assert receiver.call("notice")["request_id"] == "large"
        got = send_one(other, receiver, to, "small")
        assert len(got) == 2


def test_killed_senders_leave_nothing_at_their_receiver() -> None:
    with sides(here()) as (receiver,):
        to = open_receiver(receiver)
        names = iter(range(100))

        def cycle() -> None:
            with child() as sender:
                open_sender(sender)
                begin(sender, to, f"r-{next(names)}")
                wait_for_grant(receiver)
                sender.kill()
            assert not receiver.call("notice")["ok"]

        check_flat(resources, cycle, num_cycles=5)
        assert receiver.call("num_free") == 16
