"""How `nixl` ends amid a transfer: given up, while NIXL still writes, and with its process."""

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from cache_content import shape
from peer_process import ChildProcess
from transport_pairs import NIXL, Kind, linked_to_child, require_available
from waiting import eventually

from kvxfer.errors import TransferFailed, TransferTimeout
from kvxfer.transport import Link, Tuning
from kvxfer.transport.nixl import NixlTransport
from kvxfer.transport.nixl.slots import ABANDONED
from kvxfer.transport.nixl.wire import Kind as MessageKind

# Far more bytes than a socket takes from a sender whose peer does not read.
LARGE = shape(num_layers=1, num_kv_heads=8, head_dim=128, block_size=64, num_blocks=256)
IDS = list(range(LARGE.num_blocks))
OVER_TCP = {"engine_config": "NET_DEVICES=lo,TLS=tcp"}
STALL_S = 0.5


@pytest.fixture(scope="module", autouse=True)
def kind() -> Kind:
    require_available(NIXL)
    return NIXL


def stop_amid(link: Any, pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have process ``pid`` stand still once the next transfer has begun, and not for long."""
    ask = link._talk.ask

    def ask_and_stop(kind: MessageKind, *args: Any) -> Any:
        answer = ask(kind, *args)
        if kind is MessageKind.BEGIN:
            os.kill(pid, signal.SIGSTOP)
            link._stall_s = link._talk._stall_s = STALL_S
        return answer

    monkeypatch.setattr(link._talk, "ask", ask_and_stop)


def is_closed(link: Link) -> bool:
    try:
        link.close()
    except TransferTimeout:
        return False
    return True


@pytest.mark.parametrize("ends_by", ["looking", "closing"])
def test_what_was_given_up_is_no_end_before_nixl_has_ended_it(
    ends_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = NixlTransport(2, params=OVER_TCP)
    with ChildProcess() as child, linked_to_child(child, LARGE, transport) as (_, peer):
        link = peer.link
        stop_amid(link, child.pid, monkeypatch)
        try:
            with pytest.raises(TransferTimeout, match="was given up"):
                peer.put(IDS, IDS, tuning=Tuning(engine="direct"))
            assert link.given_up is not None
            assert not link.given_up.poll(0.0)
            with pytest.raises(TransferTimeout, match=f"process {child.pid} .* has not ended"):
                link.close()
            assert link in ABANDONED
        finally:
            os.kill(child.pid, signal.SIGCONT)
        if ends_by == "looking":
            with pytest.raises(TransferFailed, match="was given up"):
                link.given_up.wait()
        eventually(lambda: is_closed(link), "it does not end")
        assert link.given_up is None
        assert link not in ABANDONED


def test_a_peer_that_is_killed_ends_what_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = NixlTransport(2, params=OVER_TCP)
    with ChildProcess() as child, linked_to_child(child, LARGE, transport) as (_, peer):
        stop_amid(peer.link, child.pid, monkeypatch)
        with pytest.raises(TransferTimeout, match="was given up"):
            peer.put(IDS, IDS, tuning=Tuning(engine="direct"))
        given_up = peer.link.given_up
        assert given_up is not None
        child.kill()
        with pytest.raises(TransferFailed, match="was given up"):
            given_up.wait()
        peer.link.close()


ENDS = """
import contextlib, threading
import numpy as np
from kvxfer import Endpoint, KVCache, KVLayout
from kvxfer.errors import KvxferError

LAYOUT = KVLayout(4, 8, head_dim=128, dtype="float16", block_size=64)
IDS = list(range(64))
memory = [np.zeros(len(IDS) * LAYOUT.block_bytes, np.uint8) for _ in range(2)]
near, far = (Endpoint(KVCache(LAYOUT, one), transport="nixl") for one in memory)
peer = near.connect(far.addresses)
begun = threading.Event()

def put():
    with contextlib.suppress(KvxferError):  # which tells that the process ends
        while True:
            peer.put(IDS, IDS)
            begun.set()

threading.Thread(target=put, daemon=True).start()
assert begun.wait(30)
"""
CLOSES = "import atexit; atexit.register(lambda: (near.close(), far.close()))\n" + ENDS


@pytest.mark.parametrize("program", [ENDS, CLOSES], ids=["unclosed", "closed in a hook"])
def test_a_process_that_ends_amid_its_transfers_does_not_abort(program: str) -> None:
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd="/"
        )
        assert (done.returncode, done.stderr) == (0, "")
