"""What every transport on a CPU promises: the right bytes, no others, and typed refusals."""

import random
from typing import Any

import numpy as np
import pytest
from cache_content import GUARD_BYTES, shape
from peer_host import PeerHost
from peer_process import DEADLINE_S, ChildProcess, InThisProcess, RemotePeer
from transport_pairs import NIXL, Kind, LinkPair, Pair

from kvxfer import Endpoint
from kvxfer.control import ControlClient, InitReply, InitRequest
from kvxfer.errors import InvalidUsage, KvxferError, NotAvailable
from kvxfer.session.layouts import layout_spec, rank_spec
from kvxfer.transport import Tuning

SHAPES = {
    "split": shape(),
    "hnd-an-array-a-plane": shape(order="hnd", num_arrays=4),
    "packed-an-array-a-layer": shape(kv="packed", num_arrays=2),
    "mla-one-layer": shape(kv="mla", num_kv_heads=1, num_layers=1, head_dim=72),
    "pages-of-21-bytes": shape(dtype="int8", num_kv_heads=1, head_dim=7, block_size=3),
    "pages-of-288-kib": shape(block_size=9216, num_blocks=6),
}
ENGINES = {"loopback": ("auto", "memcpy", "streaming"), "shared": ("auto", "memcpy", "streaming")}


def engines(pair: Pair) -> tuple[str, ...]:
    return ENGINES.get(pair.kind.transport) or ENGINES.get(pair.kind.memory) or ("auto",)


def draw(seed: int, num_blocks: int, count: int) -> list[int]:
    return random.Random(seed).sample(range(num_blocks), count)


@pytest.mark.parametrize("name", SHAPES)
def test_put_writes_the_named_blocks_and_nothing_else(link_pair: LinkPair, name: str) -> None:
    cache = SHAPES[name]
    count = cache.num_blocks // 2
    with link_pair(cache) as pair:
        expected = cache.content(2)
        for turn, engine in enumerate(engines(pair)):
            local_ids = draw(10 + turn, cache.num_blocks, count)
            remote_ids = draw(20 + turn, cache.num_blocks, count)
            transfer = pair.peer.put(local_ids, remote_ids, tuning=Tuning(engine=engine))
            transfer.wait(DEADLINE_S)
            assert transfer.num_bytes == count * cache.num_planes * cache.page_bytes
            assert transfer.actual_path
            expected = cache.copied(cache.content(1), expected, local_ids, remote_ids)
            pair.check_both(remote=expected)


@pytest.mark.parametrize("name", SHAPES)
def test_get_reads_the_named_blocks_and_nothing_else(link_pair: LinkPair, name: str) -> None:
    cache = SHAPES[name]
    count = cache.num_blocks // 2
    with link_pair(cache) as pair:
        expected = cache.content(1)
        for turn, engine in enumerate(engines(pair)):
            local_ids = draw(30 + turn, cache.num_blocks, count)
            remote_ids = draw(40 + turn, cache.num_blocks, count)
            pair.peer.get(remote_ids, local_ids, tuning=Tuning(engine=engine)).wait(DEADLINE_S)
            expected = cache.copied(cache.content(2), expected, remote_ids, local_ids)
            pair.check_both(local=expected)


def test_the_path_is_read_back(pair: Pair) -> None:
    puts, gets = (pair.peer.put([0], [1]).actual_path, pair.peer.get([0], [1]).actual_path)
    words = {"loopback": "one process", "shared": "shared segment", "ucx": "tcp/lo"}
    expected = words.get(pair.kind.transport) or words.get(pair.kind.memory)
    if pair.kind == NIXL:
        assert (puts, gets) == ("nixl UCX, WRITE", "nixl UCX, READ")
    elif expected is None:
        assert "process_vm_writev" in puts
        assert "process_vm_readv" in gets
    else:
        assert expected in puts
        assert expected in gets
        assert ("memcpy" in puts) != (pair.kind.transport == "ucx")


def test_caches_of_unequal_length_and_grouping_join(link_pair: LinkPair) -> None:
    far, near = shape(num_blocks=5, num_arrays=2), shape(num_blocks=40, num_arrays=4)
    with link_pair(far, near) as pair:
        pair.peer.put([39, 7], [4, 0])
        pages = far.pages(far.content(2))
        source = near.pages(near.content(1)).reshape(2, 2, 40, -1)
        pages = np.array(pages)
        pages[:, :, [4, 0]] = source[:, :, [39, 7]]
        found = far.pages(pair.remote.content())
        assert np.array_equal(found, pages)
        with pytest.raises(InvalidUsage, match=r"dst_block_ids\[0\] is 5; this view has 5 blocks"):
            pair.peer.put([39], [5])


def test_a_source_may_be_sent_to_several_places(pair: Pair) -> None:
    cache = pair.remote.shape
    pair.peer.put([3, 3, 3], [0, 9, 4])
    pair.check_both(remote=cache.copied(cache.content(1), cache.content(2), [3, 3, 3], [0, 9, 4]))


@pytest.mark.parametrize("operation", ["put", "get"])
def test_no_blocks_is_a_transfer_of_nothing(pair: Pair, operation: str) -> None:
    transfer = getattr(pair.peer, operation)([], [])
    transfer.wait(DEADLINE_S)
    assert transfer.num_bytes == 0
    pair.check_both()


BAD_IDS = {
    "past the end": ([0, 1], [2, 16], r"dst_block_ids\[1\] is 16; this view has 16 blocks"),
    "far past the end": ([1 << 40], [2], r"src_block_ids\[0\] is 1099511627776"),
    "negative": ([0], [-1], r"dst_block_ids\[0\] is -1.*use 0 \.\. 15"),
    "negative source": ([-16], [0], r"src_block_ids\[0\] is -16"),
    "a destination twice": ([0, 1, 2], [5, 6, 5], r"dst_block_ids\[0\].*\[2\] are both 5"),
    "unequal numbers": ([0, 1], [5], r"source's 2 blocks hold tokens 0 to 7, the .*'s 1 tokens 0"),
    "not whole": ([0.0], [5], r"src_block_ids\[0\] is 0.0 \(float\)"),
    "a bool": ([True], [5], r"src_block_ids\[0\] is True \(bool\)"),
}


@pytest.mark.parametrize("case", BAD_IDS)
def test_bad_ids_are_refused_with_nothing_written(pair: Pair, case: str) -> None:
    src, dst, message = BAD_IDS[case]
    with pytest.raises(InvalidUsage, match=message):
        pair.peer.put(src, dst)
    with pytest.raises(InvalidUsage, match=message):
        pair.peer.get(src, dst)
    pair.check_both()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"after": 0}, "after=0 with host memory; synchronise"),
        ({"after": 94_000}, "after=94000 with host memory"),
        ({"tuning": Tuning(num_sms=8)}, "num_sms=8 with host memory"),
        ({"tuning": Tuning(engine="bulk")}, "engine 'bulk'"),
        ({"tuning": Tuning(engine="load_store")}, "engine 'load_store'"),
        ({"tuning": Tuning(engine="dma")}, "engine 'dma'"),
        ({"tuning": Tuning(engine="")}, "engine ''"),
    ],
    ids=str,
)
def test_options_of_a_gpu_are_refused_with_nothing_written(
    pair: Pair, options: dict[str, Any], message: str
) -> None:
    for post in (pair.peer.put, pair.peer.get):
        for ids in ([0, 1], []):
            with pytest.raises(InvalidUsage, match=message):
                post(ids, ids, **options)
    pair.check_both()
    # No refusal may look like a completed transfer on the far side.
    assert not pair.remote.call(
        "wait", incarnation=pair.local.endpoint.incarnation, sequence=1, timeout_s=0.0
    )


def test_another_transport_is_refused_by_both_names(kind: Kind, remote: RemotePeer) -> None:
    other = "shm" if kind.transport == "loopback" else "loopback"
    opened = remote.open(shape(), seed=2, memory=kind.memory, transport=kind.transport)
    local = PeerHost()
    local.open(
        layout=shape().fields, num_blocks=4, num_arrays=1, seed=1, memory="private", transport=other
    )
    try:
        with pytest.raises(NotAvailable, match=f"serves {kind.transport}; the peer offers {other}"):
            local.endpoint.connect(opened["addresses"])
    finally:
        local.close()
        remote.call("close")


def test_loopback_does_not_leave_its_process() -> None:
    with ChildProcess() as child:
        opened = child.open(shape(), seed=2, memory="private", transport="loopback")
        local = InThisProcess()
        local.open(shape(), seed=1, memory="private", transport="loopback")
        with pytest.raises(NotAvailable, match="stays in one process; use shm or nvlink"):
            local.host.endpoint.connect(opened["addresses"])
        local.close()


def test_nvlink_refuses_host_memory() -> None:
    local = InThisProcess()
    # Without a GPU it is not there; with one it says which memory it moves.
    with pytest.raises(KvxferError, match="nvlink") as caught:
        local.open(shape(), seed=1, memory="private", transport="nvlink")
    assert isinstance(caught.value, NotAvailable | InvalidUsage)
    local.host.cache.close()


def test_auto_takes_shm_for_host_memory() -> None:
    local = InThisProcess()
    local.open(shape(), seed=1, memory="private", transport="auto")
    assert local.host.endpoint.transport_name == "shm"
    local.close()


def test_a_closed_link_can_be_asked_whether_its_peer_lives(pair: Pair) -> None:
    """As a sender does that leaves a peer, until the peer knows or is gone."""
    pair.peer.link.close()
    pair.peer.link.require_open()


def test_a_link_knows_the_regions_of_its_peer(link_pair: LinkPair) -> None:
    cache = shape(num_arrays=4)
    with link_pair(cache) as pair:
        link = pair.peer.link
        assert list(link.region_bytes) == [cache.array_bytes] * 4
        assert link.region_addresses.dtype == np.uint64
        assert link.region_addresses.shape == (4,)
        assert link.path
        assert pair.peer.incarnation == pair.remote_opened["incarnation"]


def test_a_region_starts_where_the_array_does_not_where_its_segment_does(
    link_pair: LinkPair,
) -> None:
    # Every array lies GUARD_BYTES into its segment, so an offset that is lost shows in the guard.
    assert GUARD_BYTES > 0
    cache = shape(num_arrays=2)
    ids = list(range(cache.num_blocks))
    with link_pair(cache) as pair:
        pair.peer.put(ids, ids)
        pair.check_both(remote=cache.copied(cache.content(1), cache.content(2), ids, ids))


def test_the_control_plane_moves_no_list_of_pages(pair: Pair) -> None:
    endpoint: Endpoint = pair.local.endpoint
    with ControlClient(pair.remote_opened["addresses"]["init"], InitReply) as client:
        reply = client.call(
            InitRequest(
                incarnation=endpoint.incarnation,
                layout=layout_spec(pair.local.cache.shard.model),
                rank=rank_spec(pair.local.cache.shard.rank),
                transports=[pair.kind.transport],
            )
        )
    own = pair.remote.shape.fields
    assert len(reply.planes) == own["num_layers"] * 2
    assert sum(map(len, reply.regions)) + len(reply.board) < 1024
