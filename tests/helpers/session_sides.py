"""Both sides of sessions in tests: children that can be killed, and this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cache_content import CacheShape, check_content, shape
from free_ports import channel_ports
from peer_process import ChildProcess, InThisProcess, RemotePeer
from session_host import SessionHost

GUARD_S = 20.0
RECEIVER_SEED = 2
SENDER_SEED = 1
# Far above what anything takes: a test that waits for the end of one asks for less itself.
RECEIVE_LIMITS = {"wait_s": 60.0, "receive_s": 60.0, "drain_s": 60.0, "silent_s": 60.0}
SEND_LIMITS = {
    "connect_s": 60.0,
    "reserve_s": 60.0,
    "move_s": 60.0,
    "commit_s": 60.0,
    "silent_s": 60.0,
}


def child() -> ChildProcess:
    """A process of its own, with nothing open yet."""
    return ChildProcess(Path(__file__).with_name("session_host.py"))


def here() -> RemotePeer:
    """This process."""
    return InThisProcess(SessionHost())


def open_receiver(
    side: RemotePeer, cache: CacheShape | None = None, *, seed: int = RECEIVER_SEED, **args: Any
) -> dict[str, str]:
    """Open a receiver; returns its addresses."""
    limits = RECEIVE_LIMITS | args.pop("limits", {})
    args.setdefault("ports", channel_ports())
    opened = side.open(cache or shape(), role="receiver", seed=seed, limits=limits, **args)
    addresses: dict[str, str] = opened["addresses"]
    return addresses


def open_sender(
    side: RemotePeer, cache: CacheShape | None = None, *, seed: int = SENDER_SEED, **args: Any
) -> None:
    """Open a sender."""
    limits = SEND_LIMITS | args.pop("limits", {})
    side.open(cache or shape(), role="sender", seed=seed, limits=limits, **args)


def meet(sender: RemotePeer, *receivers: tuple[RemotePeer, dict[str, str]]) -> None:
    """Connect a sender to receivers at their addresses, by one request of nothing."""
    sender.call("send", request_id="meet", block_ids=[], to=[to for _, to in receivers])
    sender.call("wait", request_id="meet")
    for receiver, _ in receivers:
        assert receiver.call("notice")["ok"]


@contextmanager
def sides(*made: RemotePeer) -> Iterator[tuple[RemotePeer, ...]]:
    """Close all of them at the end, whatever became of them."""
    try:
        yield made
    finally:
        for side in made:
            side.close()


def ports_of(addresses: dict[str, str]) -> dict[str, int]:
    """The ports, for a successor at the same addresses."""
    return {name: int(url.rpartition(":")[2]) for name, url in addresses.items()}


def check_received(
    receiver: RemotePeer,
    sent: list[int],
    got: list[int],
    *,
    src_seed: int = SENDER_SEED,
    dst_seed: int = RECEIVER_SEED,
) -> None:
    """Every byte of the receiver's memory after one request, guards included."""
    cache = receiver.shape
    expected = cache.copied(cache.content(src_seed), cache.content(dst_seed), sent, got)
    check_content(cache, receiver.content(), expected)
