"""What `ucx` promises beside the contract: its engines, where it listens, whom it reaches."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from cache_content import CacheShape, check_content, shape
from leaks import check_flat
from listening import listening_hosts
from peer_host import PeerHost
from peer_process import DEADLINE_S, ChildProcess, InThisProcess, RemotePeer
from transport_pairs import UCX, Kind, LinkPair, Pair, linked, require_available
from ucx_wire import RawPeer
from waiting import eventually

from kvxfer.errors import InvalidUsage, NotAvailable, PeerLost, ProtocolMismatch
from kvxfer.layout import CopyPlan
from kvxfer.memory import MemoryKind, register
from kvxfer.transport import Op, Tuning, create_transport
from kvxfer.transport.ucx import UcxTransport

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def kind() -> Kind:
    require_available(UCX)
    return UCX


SHAPES = {
    "pages of 128 bytes": shape(),
    "pages of 24 KiB": shape(head_dim=96, block_size=64, num_blocks=200),
    "pages of 320 KiB": shape(head_dim=80, block_size=1024, num_blocks=9),
    "pages of 5 MiB": shape(num_layers=1, head_dim=80, block_size=16384, num_blocks=3),
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


@pytest.fixture
def in_this_process() -> Iterator[RemotePeer]:
    far = InThisProcess()
    yield far
    far.close()


def test_two_sides_of_one_process_link(in_this_process: RemotePeer) -> None:
    cache = shape()
    with linked(UCX, in_this_process) as pair:
        pair.peer.put([0, 1], [2, 3])
        pair.check_both(remote=cache.copied(cache.content(1), cache.content(2), [0, 1], [2, 3]))


def test_shared_memory_of_ucx_can_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    # UCX leaves it out of links that are to notice a lost peer at once; settings say otherwise.
    monkeypatch.setenv("UCX_MM_ERROR_HANDLING", "y")
    cache = SHAPES["pages of 24 KiB"]
    ids = list(range(cache.num_blocks))
    with ChildProcess() as child, linked(UCX, child, cache) as pair:
        for engine in ("direct", "staged"):
            transfer = pair.peer.put(ids, ids[::-1], tuning=Tuning(engine=engine))
            assert "memory" in transfer.actual_path
        pair.check_both(remote=cache.copied(cache.content(1), cache.content(2), ids, ids[::-1]))


def test_options_go_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "nonsense")
    far, near = PeerHost(), PeerHost()
    args: dict[str, Any] = {"layout": shape().fields, "num_blocks": 4, "num_arrays": 1}
    try:
        for seed, side in enumerate((far, near)):
            transport = UcxTransport(options={"TLS": "tcp"})
            side.open(**args, memory="private", transport=transport, seed=seed)  # type: ignore[arg-type]
        with near.endpoint.connect(far.endpoint.addresses) as peer:
            assert peer.put([0], [1]).actual_path == "ucx tcp/lo"
    finally:
        near.close()
        far.close()


def test_an_option_that_ucx_does_not_know_is_refused() -> None:
    near = PeerHost()
    transport = UcxTransport(options={"NO_SUCH_SETTING": "1"})
    with pytest.raises(InvalidUsage, match="UCX takes no option NO_SUCH_SETTING=1"):
        near.open(
            layout=shape().fields,
            num_blocks=4,
            num_arrays=1,
            memory="private",
            transport=transport,  # type: ignore[arg-type]
            seed=1,
        )
    near.cache.close()


def test_only_loopback_is_listened_on(pair: Pair) -> None:
    assert isinstance(pair.remote, ChildProcess)
    assert listening_hosts(pair.remote.pid) == {"127.0.0.1"}
    assert listening_hosts(os.getpid()) == {"127.0.0.1"}


def test_a_listener_on_all_addresses_would_be_seen() -> None:
    with socket.socket() as everywhere:
        everywhere.bind(("0.0.0.0", 0))
        everywhere.listen()
        assert "0.0.0.0" in listening_hosts(os.getpid())


@pytest.mark.parametrize(
    ("host", "message"),
    [("0.0.0.0", "bind to one address"), ("::", "bind to one"), ("localhost", "a numeric address")],
)
def test_an_address_that_cannot_be_told_to_peers_is_refused(host: str, message: str) -> None:
    board: Any = None
    with pytest.raises(InvalidUsage, match=message):
        UcxTransport().serve(board, host)


def change_server(region: bytes, **fields: Any) -> bytes:
    tree = msgspec.msgpack.decode(region)
    tree["server"].update(fields)
    return msgspec.msgpack.encode(tree)


def fetch(pair: Pair) -> tuple[list[bytes], bytes]:
    raw = RawPeer(pair)
    return raw.reply.regions, raw.reply.board


def test_metadata_of_several_servers_or_none_is_refused(link_pair: LinkPair) -> None:
    with link_pair(shape(num_arrays=2)) as pair:
        regions, board = fetch(pair)
        transport, cache = create_transport("ucx", memory=MemoryKind.HOST), pair.local.cache
        with pytest.raises(ProtocolMismatch, match="0 regions of 0 servers"):
            transport.link(cache, [], board)
        other = [regions[0], change_server(regions[1], port=1)]
        with pytest.raises(ProtocolMismatch, match="2 regions of 2 servers"):
            transport.link(cache, other, board)
        process = msgspec.msgpack.decode(regions[0])["server"]["process"]
        stranger = [change_server(one, process=process | {"pid": 1}) for one in regions]
        with pytest.raises(ProtocolMismatch, match="name different processes"):
            transport.link(cache, stranger, board)


def test_a_peer_on_another_network_is_refused_with_the_remedy(pair: Pair) -> None:
    regions, board = fetch(pair)
    transport = create_transport("ucx", memory=MemoryKind.HOST)
    far = [change_server(region, host="192.0.2.7") for region in regions]
    with pytest.raises(NotAvailable, match=r"bound to 127.0.0.1 and the peer to 192.0.2.7; bind"):
        transport.link(pair.local.cache, far, board)


def test_nobody_at_the_port_is_a_lost_peer(pair: Pair) -> None:
    regions, board = fetch(pair)
    transport = create_transport("ucx", memory=MemoryKind.HOST)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and not listening
        far = [change_server(region, port=taken.getsockname()[1]) for region in regions]
        with pytest.raises(PeerLost, match="process"):
            transport.link(pair.local.cache, far, board)


def test_a_closed_export_is_gone_for_those_who_know_it(in_this_process: RemotePeer) -> None:
    with linked(UCX, in_this_process) as pair:
        regions, board = fetch(pair)
        in_this_process.call("close_endpoint")
        transport = create_transport("ucx", memory=MemoryKind.HOST)
        with pytest.raises(PeerLost):
            transport.link(pair.local.cache, regions, board)


def test_a_slot_of_the_board_is_in_use_while_its_peer_is_linked(
    in_this_process: RemotePeer,
) -> None:
    assert isinstance(in_this_process, InThisProcess)
    with linked(UCX, in_this_process) as pair:
        endpoint = in_this_process.host.endpoint
        slot = endpoint._slots[pair.peer.connection]
        assert endpoint._board._words[slot, 1] == os.getpid()
        assert not endpoint._board.has_parted(slot)
        pair.peer.close()
        eventually(lambda: endpoint._board.has_parted(slot), "the slot's peer has parted")
        assert endpoint._board.identity_of(slot) is None


def test_200_connections_leave_nothing_on_either_side(pair: Pair) -> None:
    def cycle() -> None:
        with pair.local.endpoint.connect(pair.remote_opened["addresses"]) as peer:
            peer.put([0], [1])

    check_flat(pair.resources, cycle, num_cycles=200)


@pytest.mark.parametrize("host", ["::1", "::ffff:127.0.0.1"])
def test_addresses_of_ipv6(kind: Kind, host: str) -> None:
    with ChildProcess() as far, linked(kind, far, opened_with={"bind_host": host}) as pair:
        for _ in range(3):
            pair.peer.put([0, 1], [2, 3])
            with pair.local.endpoint.connect(pair.remote_opened["addresses"]) as again:
                again.put([0, 1], [2, 3])
        cache = pair.remote.shape
        pair.check_both(remote=cache.copied(cache.content(1), cache.content(2), [0, 1], [2, 3]))


def test_a_plan_of_other_addresses_is_refused_and_the_link_stands(pair: Pair) -> None:
    link = pair.peer.link
    local = pair.local._raw[0].ctypes.data
    far, far_bytes = int(link.region_addresses[0]), int(link.region_bytes[0])
    beyond = CopyPlan.contiguous(local, far + far_bytes - 63, 64)
    with pytest.raises(InvalidUsage, match="do not lie in an exported region"):
        link.post(beyond, Op.PUT)
    with pytest.raises(InvalidUsage, match="do not lie in an exported region"):
        link.post(CopyPlan.contiguous(far + far_bytes - 63, local, 64), Op.GET)
    pair.check_both()
    pair.peer.put([0], [1])
    cache = pair.remote.shape
    pair.check_both(remote=cache.copied(cache.content(1), cache.content(2), [0], [1]))


def test_nothing_is_exported_before_the_board_is_known() -> None:
    with (
        register(np.zeros(64, np.uint8)) as registration,
        pytest.raises(InvalidUsage, match="call serve"),
    ):
        UcxTransport().export(registration)


def test_the_race_fails_on_a_signal_ahead_of_its_data(
    in_this_process: RemotePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(in_this_process, InThisProcess)
    cache: CacheShape = shape(num_layers=4, block_size=128)
    ids = list(range(cache.num_blocks))
    with linked(UCX, in_this_process, cache) as pair:
        endpoint = in_this_process.host.endpoint
        link: Any = pair.peer.link
        copy = link._copy

        def signal_early(*args: Any) -> Any:
            endpoint._board._flags.signal(endpoint._slots[pair.peer.connection], 1)
            result()
            return copy(*args)

        monkeypatch.setattr(link, "_copy", signal_early)
        pair.local.stamp(1, ids)
        outcome: list[dict[str, Any]] = []
        told = in_this_process.start(
            "expect",
            incarnation=pair.peer.connection,
            sequence=1,
            round_number=1,
            src_block_ids=ids,
            dst_block_ids=ids,
            timeout_s=DEADLINE_S,
        )

        def result() -> None:
            outcome.append(told())

        pair.peer.put(ids, ids)
        assert outcome[0]["num_stale"] > 0


def test_what_is_no_ucx_is_refused_with_the_reason_of_each() -> None:
    script = (
        "from kvxfer import _core\n"
        "try:\n    _core.ucx_load(['libnosuchthing.so.9', 'libc.so.6'])\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd="/",  # in a source tree Python would find a kvxfer/ without _core
    )
    assert "NotAvailable libnosuchthing.so.9: cannot open" in found.stdout
    assert "libc.so.6: it has no ucp_get_version" in found.stdout


def test_the_checks_of_content_see_a_transfer(pair: Pair) -> None:
    pair.peer.put([0], [1])
    cache = pair.remote.shape
    with pytest.raises(AssertionError, match="block 1"):
        check_content(cache, pair.remote.content(), cache.content(2))
