"""What `nixl` promises beside the contract: its engines, where it listens, whom it believes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from cache_content import check_content, shape
from leaks import check_flat
from listening import listening_hosts
from nixl_strangers import answers, hello, region_of, stranger
from peer_host import PeerHost
from peer_process import ChildProcess
from transport_pairs import NIXL, Kind, LinkPair, Pair, linked_to_child, require_available

from kvxfer.errors import InvalidUsage, KvxferError, NotAvailable, PeerLost, TransferTimeout
from kvxfer.layout import CopyPlan
from kvxfer.transport import Op, Transport, Tuning
from kvxfer.transport.nixl import NixlTransport, pieces, wire
from kvxfer.transport.nixl.wire import Kind as MessageKind
from kvxfer.transport.nixl.wire import Message

STALL_S = 1.5
DEADLINE_S = 30.0  # far above what any of this takes


@pytest.fixture(scope="module", autouse=True)
def kind() -> Kind:
    require_available(NIXL)
    return NIXL


SHAPES = {
    "pages of 128 bytes": shape(),
    "pages of 24 KiB": shape(head_dim=96, block_size=64, num_blocks=200),
    "pages longer than a slot": shape(
        num_layers=1, num_kv_heads=1, head_dim=80, block_size=16384, num_blocks=3
    ),
}


@pytest.mark.parametrize("engine", ["auto", "direct", "staged"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_engine_moves_the_same_bytes(link_pair: LinkPair, name: str, engine: str) -> None:
    cache = SHAPES[name]
    ids = np.random.default_rng(3).permutation(cache.num_blocks).tolist()
    with link_pair(cache) as pair:
        tuning = Tuning(engine=engine)
        pair.peer.put(ids, ids[::-1], tuning=tuning)
        expected = cache.copied(cache.content(1), cache.content(2), ids, ids[::-1])
        pair.check_both(remote=expected)
        pair.peer.get(ids, ids, tuning=tuning)
        pair.check_both(remote=expected, local=cache.copied(expected, cache.content(1), ids, ids))


def open_side(transport: Transport | str, **options: Any) -> PeerHost:
    host = PeerHost()
    options |= {"layout": shape().fields, "num_blocks": 4, "num_arrays": 1, "seed": 1}
    host.open(memory="private", transport=transport, **options)
    return host


def test_only_loopback_is_listened_on(pair: Pair) -> None:
    assert isinstance(pair.remote, ChildProcess)
    pair.peer.put([0], [1])
    assert listening_hosts(pair.remote.pid) == {"127.0.0.1"}
    assert listening_hosts(os.getpid()) == {"127.0.0.1"}


@pytest.mark.parametrize("bind_host", ["::1", "::ffff:127.0.0.1"])
def test_every_way_to_write_loopback_is_of_one_network(pair: Pair, bind_host: str) -> None:
    near = open_side("nixl", bind_host=bind_host)
    try:
        with near.endpoint.connect(pair.remote_opened["addresses"]) as peer:
            peer.put([0], [1])
    finally:
        near.close()


def test_100_connections_leave_nothing_on_either_side(pair: Pair) -> None:
    def cycle() -> None:
        with pair.local.endpoint.connect(pair.remote_opened["addresses"]) as peer:
            peer.put([0], [1])

    check_flat(pair.resources, cycle, num_cycles=100)


def test_a_plan_of_other_addresses_is_refused_and_the_link_stands(pair: Pair) -> None:
    link = pair.peer.link
    local = pair.local._raw[0].ctypes.data
    far, far_bytes = int(link.region_addresses[0]), int(link.region_bytes[0])
    for engine in ("direct", "staged"):
        tuning = Tuning(engine=engine)
        beyond = far + far_bytes - 63
        with pytest.raises(InvalidUsage, match="do not lie in an exported region"):
            link.post(CopyPlan.contiguous(local, beyond, 64), Op.PUT, tuning=tuning)
        with pytest.raises(InvalidUsage, match="do not lie in an exported region"):
            link.post(CopyPlan.contiguous(beyond, local, 64), Op.GET, tuning=tuning)
    pair.check_both()
    pair.peer.put([0], [1])
    cache = pair.remote.shape
    pair.check_both(remote=cache.copied(cache.content(1), cache.content(2), [0], [1]))


def test_the_far_side_refuses_a_piece_that_this_side_lets_pass(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = pair.peer.link
    local, far = pair.local._raw[0].ctypes.data, int(link.region_addresses[0])
    monkeypatch.setattr(pieces, "is_inside", lambda *args, **options: True)
    beyond = CopyPlan.contiguous(local, far - 64, 64)  # its guard
    with pytest.raises(InvalidUsage, match="do not lie in an exported region, or exceed its slot"):
        link.post(beyond, Op.PUT, tuning=Tuning(engine="staged"))
    pair.check_both()
    with pytest.raises(PeerLost, match="connect again"):
        pair.peer.put([0], [1])


def test_nixl_that_is_not_installed_is_a_reason() -> None:
    script = (
        "import sys\n"
        "for name in ('nixl', 'nixl_cu12', 'nixl_cu13'):\n    sys.modules[name] = None\n"
        "from kvxfer.transport import available_transports\n"
        "found = available_transports()['nixl']\n"
        "print(found.available, found.reason)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd="/",  # in a source tree Python would find a kvxfer/ without _core
    )
    assert "False NIXL" in found.stdout


def test_a_plug_in_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(NotAvailable, match=r"no plug-in 'NO_SUCH' here; it has .*UCX"):
        open_side(NixlTransport(backend="NO_SUCH"))


def test_parameters_of_the_plug_in_are_used(pair: Pair) -> None:
    near = open_side(NixlTransport(params={"engine_config": "NET_DEVICES=lo,TLS=tcp"}))
    try:
        with near.endpoint.connect(pair.remote_opened["addresses"]) as peer:
            peer.put([0], [1])
    finally:
        near.close()
    with pytest.raises(NotAvailable, match="NIXL does not start UCX"):
        open_side(NixlTransport(params={"engine_config": "NET_DEVICES=nosuch"}))


def test_a_signal_ahead_of_its_data_is_seen(
    link_pair: LinkPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = shape(num_layers=4, block_size=128)
    ids = list(range(cache.num_blocks))
    with link_pair(cache) as pair:
        link: Any = pair.peer.link
        ask = link._talk.ask

        def finish_first(kind: MessageKind, expect: MessageKind, number: int) -> Message:
            if kind is MessageKind.FINISH:
                return Message(link._talk.key, expect, number=number)
            answer = ask(kind, expect, number)
            assert ask(MessageKind.FINISH, MessageKind.DONE, number)
            outcome.append(told())
            return answer

        pair.local.stamp(1, ids)
        outcome: list[dict[str, Any]] = []
        told = pair.remote.start(
            "expect",
            incarnation=pair.peer.connection,
            sequence=1,
            round_number=1,
            src_block_ids=ids,
            dst_block_ids=ids,
            timeout_s=DEADLINE_S,
        )
        monkeypatch.setattr(link._talk, "ask", finish_first)
        pair.peer.put(ids, ids, tuning=Tuning(engine="direct"))
        assert outcome[0]["signalled"]
        assert outcome[0]["num_stale"] > 0


# Messages that no link of ours sends.


def test_a_stranger_without_the_secret_is_not_answered(pair: Pair) -> None:
    region, _ = region_of(pair)
    key = b"k" * wire.ID_BYTES
    with stranger(region) as agent:
        right, wrong = hello(agent, region), hello(agent, region, secret=bytes(16))
        for body in (wrong, b"", b"\xff" * 300, right[:-1]):
            agent.send(region["agent"], Message(key, MessageKind.HELLO, body=body))
        assert MessageKind.WELCOME not in {one.kind for one in answers(agent, key)}
        agent.send(region["agent"], Message(key, MessageKind.HELLO, body=right))
        assert [one.kind for one in answers(agent, key, 1)] == [MessageKind.WELCOME]
    pair.peer.put([0], [1])
    cache = pair.remote.shape
    pair.check_both(remote=cache.copied(cache.content(1), cache.content(2), [0], [1]))


def test_a_stranger_does_not_speak_for_another(pair: Pair) -> None:
    region, _ = region_of(pair)
    talk = pair.peer.link._talk  # type: ignore[attr-defined]
    slot_in_use = msgspec.msgpack.decode(region_of(pair)[1].board)["slot"]
    key = b"k" * wire.ID_BYTES
    with stranger(region) as agent:
        for message in (MessageKind.BEGIN, MessageKind.FINISH, MessageKind.LEAVE):
            agent.send(region["agent"], Message(talk.key, message, number=1))
        body = hello(agent, region, slot=slot_in_use)
        agent.send(region["agent"], Message(key, MessageKind.HELLO, body=body))
        assert [one.kind for one in answers(agent, key, 1)] == [MessageKind.FAIL]
    assert pair.peer.put([0], [1]).sequence == 1


def test_a_stranger_does_not_take_the_name_of_another(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, _ = region_of(pair)
    name = pair.peer.link._agent.name  # type: ignore[attr-defined]
    key = b"k" * wire.ID_BYTES
    with monkeypatch.context() as patch:
        hexadecimal = SimpleNamespace(hex=name.removeprefix("kvxfer-"))
        patch.setattr("uuid.uuid4", lambda: hexadecimal)
        forged = stranger(region)
        agent = forged.__enter__()
    try:
        assert agent.name == name
        body = hello(agent, region)
        agent.send(region["agent"], Message(key, MessageKind.HELLO, body=body))
        assert answers(agent, key) == []
        assert pair.peer.put([0], [1]).sequence == 1
    finally:
        forged.__exit__(None, None, None)


def test_a_stranger_that_talks_nonsense_harms_nobody(pair: Pair) -> None:
    region, _ = region_of(pair)
    random = np.random.default_rng(5)
    key = b"k" * wire.ID_BYTES
    with stranger(region) as agent:
        body = hello(agent, region)
        agent.send(region["agent"], Message(key, MessageKind.HELLO, body=body))
        assert [one.kind for one in answers(agent, key, 1)] == [MessageKind.WELCOME]
        for number in range(500):
            raw = random.bytes(int(random.integers(0, 200)))
            if number % 2:
                some = list(MessageKind)[int(random.integers(2, 12))]
                slot = int(random.integers(0, 1 << 8))
                raw = Message(key, some, slot, number % 3, raw).encode()
            agent._agent.send_notif(region["agent"], raw)
        answers(agent, key)
    pair.peer.put([0], [1])
    cache = pair.remote.shape
    pair.check_both(remote=cache.copied(cache.content(1), cache.content(2), [0], [1]))


# Peers that end or hang.

LARGE = shape(num_layers=1, num_kv_heads=8, head_dim=128, block_size=64, num_blocks=64)
IDS = list(range(LARGE.num_blocks))


def error_of(post: Callable[[], object], stop: Callable[[], None]) -> KvxferError:
    """What posts one behind another end with, once ``stop`` has come in between."""
    post()
    end = time.monotonic() + DEADLINE_S
    stop()
    while time.monotonic() < end:
        try:
            post()
        except KvxferError as error:
            return error
    raise AssertionError("the transfers go on")


@pytest.mark.parametrize("engine", ["direct", "staged"])
@pytest.mark.parametrize("operation", ["put", "get"])
def test_a_killed_peer_is_lost(operation: str, engine: str) -> None:
    with (
        ChildProcess() as child,
        linked_to_child(child, LARGE, NixlTransport(2)) as (local, peer),
    ):
        post = getattr(peer, operation)
        error = error_of(lambda: post(IDS, IDS, tuning=Tuning(engine=engine)), child.kill)
        assert isinstance(error, PeerLost)
        with pytest.raises(PeerLost, match=str(child.pid)):
            peer.put([0], [0])
        if operation == "put":
            check_content(LARGE, local.content(), LARGE.content(1))


@pytest.mark.parametrize("engine", ["direct", "staged"])
def test_a_peer_that_hangs_is_given_up(engine: str) -> None:
    with (
        ChildProcess() as child,
        linked_to_child(child, LARGE, NixlTransport(2)) as (_, peer),
    ):

        def post() -> None:
            peer.put(IDS, IDS, tuning=Tuning(engine=engine))

        def stop() -> None:
            os.kill(child.pid, signal.SIGSTOP)
            peer.link._talk._stall_s = STALL_S  # type: ignore[attr-defined]

        try:
            error = error_of(post, stop)
            assert isinstance(error, TransferTimeout)
            assert f"has not moved for {STALL_S:.6f} s and was given up" in str(error)
            with pytest.raises(PeerLost, match="connect again"):
                peer.put([0], [0])
        finally:
            os.kill(child.pid, signal.SIGCONT)
        assert child.call("num_free") == LARGE.num_blocks


def test_a_poster_that_was_killed_is_dropped_and_others_served(pair: Pair) -> None:
    before = pair.remote.call("resources")
    with ChildProcess() as child:
        opened = child.open(shape(), seed=3, memory="private", transport="nixl")
        assert opened["addresses"]
        with pair.local.endpoint.connect(opened["addresses"]) as peer:
            peer.put([0], [1])
            child.kill()
        child.reap()
    pair.peer.put([0], [1])
    assert pair.remote.call("resources").keys() == before.keys()
