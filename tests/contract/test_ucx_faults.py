"""Peers of `ucx` that die or hang halfway: a typed error within the deadline, on either side."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ucx_side
from cache_content import check_content, shape
from peer_process import ChildProcess
from transport_pairs import UCX, linked, linked_to_child, require_available
from two_hosts import HOSTS, start_on_host, two_hosts

from kvxfer import Peer
from kvxfer.errors import KvxferError, PeerLost, TransferTimeout
from kvxfer.transport.ucx import UcxTransport, _poll

__all__ = ["two_hosts"]  # a fixture

_SIDE = Path(__file__).parents[1] / "helpers" / "ucx_side.py"
STALL_S = 5.0  # all of it is waited for
DEADLINE_S = 30.0  # far above what any of this takes
# 16 MiB: more than is on the way at once, so that a peer which stops leaves a transfer halfway.
LARGE = shape(num_layers=1, num_kv_heads=8, head_dim=128, block_size=64, num_blocks=64)
IDS = list(range(LARGE.num_blocks))


@pytest.fixture(scope="module", autouse=True)
def available() -> None:
    require_available(UCX)


class Posted:
    """Transfers one behind another in a thread of its own, and how they ended."""

    def __init__(self, peer: Peer, operation: str) -> None:
        self._error: KvxferError | None = None
        self.num_done = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(peer, operation), daemon=True)
        self._thread.start()
        wait_until(lambda: self.num_done > 0)

    def _run(self, peer: Peer, operation: str) -> None:
        try:
            while not self._stop.is_set():
                getattr(peer, operation)(IDS, IDS)
                self.num_done += 1
        except KvxferError as error:
            self._error = error

    def stop(self) -> None:
        """End behind the transfer that is under way."""
        self._stop.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the transfer hangs"

    def error(self) -> KvxferError:
        """What they ended with."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the transfers go on, or hang"
        assert self._error is not None
        return self._error


@pytest.mark.parametrize("operation", ["put", "get"])
def test_a_peer_killed_halfway_is_lost(operation: str) -> None:
    with (
        ChildProcess() as child,
        linked_to_child(child, LARGE, UcxTransport(2)) as (local, peer),
    ):
        posted = Posted(peer, operation)
        child.kill()
        error = posted.error()
        assert isinstance(error, PeerLost)
        assert f"process {child.pid} ended" in str(error)
        for again in (peer.put, peer.get):
            with pytest.raises(PeerLost, match="connect again"):
                again([0], [0])
        if operation == "put":
            check_content(LARGE, local.content(), LARGE.content(1))


@pytest.mark.parametrize("operation", ["put", "get"])
def test_a_peer_that_hangs_halfway_is_given_up(operation: str) -> None:
    with (
        ChildProcess() as child,
        linked_to_child(child, LARGE, UcxTransport(2, stall_s=STALL_S)) as (_, peer),
    ):
        posted = Posted(peer, operation)
        os.kill(child.pid, signal.SIGSTOP)
        try:
            error = posted.error()
            assert isinstance(error, TransferTimeout)
            assert f"has not moved for {STALL_S:.6f} s and was given up" in str(error)
            with pytest.raises(PeerLost, match="connect again"):
                peer.put([0], [0])
        finally:
            os.kill(child.pid, signal.SIGCONT)
        # It lives on, and takes what comes over a new link.
        assert child.call("num_free") == LARGE.num_blocks


def test_a_hung_peer_that_comes_back_in_time_is_waited_for() -> None:
    with (
        ChildProcess() as child,
        linked_to_child(child, LARGE, UcxTransport(2)) as (_, peer),
    ):
        posted = Posted(peer, "put")
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(0.5)
        num_done = posted.num_done
        os.kill(child.pid, signal.SIGCONT)
        wait_until(lambda: posted.num_done > num_done)
        posted.stop()
        expected = LARGE.copied(LARGE.content(1), LARGE.content(2), IDS, IDS)
        check_content(LARGE, child.content(), expected)


def test_a_sender_killed_halfway_is_dropped_and_others_served() -> None:
    server = subprocess.Popen(
        [sys.executable, str(_SIDE), "serve", "127.0.0.1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        description = server.stdout.readline()
        for _ in range(2):
            sender = put_in_a_process(description, 10_000)
            assert sender.stdout is not None
            assert sender.stdout.readline() == "started\n"
            time.sleep(0.3)
            assert sender.poll() is None
            sender.kill()
            sender.communicate(timeout=DEADLINE_S)
        sender = put_in_a_process(description, 1)
        out, _ = sender.communicate(timeout=DEADLINE_S)
        assert out.splitlines() == ["started", "ucx tcp/lo"]
        total, _ = server.communicate("\n", timeout=DEADLINE_S)
        assert int(total) == ucx_side.NUM_BYTES
    finally:
        server.kill()
        server.communicate()


def put_in_a_process(description: str, num_puts: int) -> "subprocess.Popen[str]":
    arguments = [sys.executable, str(_SIDE), "put", "127.0.0.1", description, str(num_puts)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_a_killed_sender_leaves_no_connection() -> None:
    with ucx_side.side("127.0.0.1", 0) as here:
        sender = put_in_a_process(here.description, 10_000)
        assert sender.stdout is not None
        assert sender.stdout.readline() == "started\n"
        assert here.num_connections == 1
        sender.kill()
        sender.communicate(timeout=DEADLINE_S)
        wait_until(lambda: here.num_connections == 0)


def wait_until(condition: Any) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, "it never came about"
        time.sleep(0.02)


def test_an_endpoint_closes_with_a_hung_sender_halfway() -> None:
    with ChildProcess() as child, linked(UCX, child, LARGE) as pair:
        posted = Posted(pair.peer, "get")
        os.kill(child.pid, signal.SIGSTOP)
        try:
            pair.local.endpoint.close()  # its own server has no peer: it must not wait for one
        finally:
            os.kill(child.pid, signal.SIGCONT)
        posted.stop()


def test_a_transfer_that_is_interrupted_closes_its_link() -> None:
    class Interrupted:
        closed = False

        def poll(self, timeout_s: float) -> bool:
            raise KeyboardInterrupt

        def close(self) -> bool:
            self.closed = True
            return True

    native: Any = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        _poll(native)
    assert native.closed


# Two hosts, as far as the network is concerned.


def on_host(index: int, *arguments: str) -> "subprocess.Popen[str]":
    return start_on_host(index, sys.executable, str(_SIDE), *arguments)


@pytest.mark.usefixtures("two_hosts")
def test_two_hosts_are_joined_by_their_network() -> None:
    server = on_host(0, "serve", HOSTS[0])
    sender = None
    try:
        assert server.stdout is not None
        sender = on_host(1, "put", HOSTS[1], server.stdout.readline(), "2")
        out, _ = sender.communicate(timeout=DEADLINE_S)
        assert out.splitlines() == ["started", "ucx tcp/kvxfer-vb"]
        total, _ = server.communicate("\n", timeout=DEADLINE_S)
        assert int(total) == ucx_side.NUM_BYTES
    finally:
        for process in (server, sender):
            if process is not None:
                process.kill()
                process.communicate()
