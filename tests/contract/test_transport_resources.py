"""What a transfer costs beside its bytes: no second copy of them, and nothing that stays behind."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_content import CacheShape, shape
from leaks import check_flat, num_segment_mappings, private_growth, resources
from peer_host import PeerHost
from transport_pairs import ON_ONE_HOST, LinkPair, Pair
from waiting import eventually

from kvxfer import Endpoint
from kvxfer.errors import NotAvailable

MIB = 1 << 20
# 2 planes x 64 blocks x 512 KiB.
LARGE = shape(num_layers=1, num_kv_heads=8, head_dim=128, block_size=256, num_blocks=64)
MAX_GROWTH_BYTES = 16 * MIB


def transfer_all(pair: Pair, cache: CacheShape) -> None:
    """Send every block there and back."""
    ids = np.arange(cache.num_blocks)
    pair.peer.put(ids, ids[::-1])
    pair.peer.get(ids[::-1], ids)


def test_a_transfer_of_64_mib_keeps_no_copy_of_them(link_pair: LinkPair) -> None:
    assert LARGE.array_bytes == 64 * MIB
    with link_pair(LARGE) as pair:
        # Pages that were never touched would count as growth where they are written first.
        pair.local.fill(1)
        before = pair.remote.call("private_bytes")
        with private_growth() as growth:
            transfer_all(pair, LARGE)
        assert growth.peak_bytes < MAX_GROWTH_BYTES
        assert pair.remote.call("private_bytes") - before < MAX_GROWTH_BYTES


def test_the_memory_check_sees_a_hidden_copy(
    link_pair: LinkPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with link_pair(LARGE) as pair, private_growth() as growth:
        link: Any = pair.peer.link
        copy = link._copy

        def staged(*args: Any) -> Any:
            staging = np.ones(LARGE.array_bytes, np.uint8)
            num_samples = growth.num_samples
            # The first of them may have begun before.
            eventually(lambda: growth.num_samples > num_samples + 1, "nobody watches")
            assert staging.all()
            return copy(*args)

        monkeypatch.setattr(link, "_copy", staged)
        transfer_all(pair, LARGE)
    assert growth.peak_bytes > LARGE.array_bytes // 2 > MAX_GROWTH_BYTES


def test_connecting_and_closing_leaves_nothing_on_either_side(pair: Pair) -> None:
    addresses = pair.remote_opened["addresses"]

    def cycle() -> None:
        with pair.local.endpoint.connect(addresses) as peer:
            peer.reserve("r", 1)
            peer.put([0], [1])
            peer.abort("r")

    check_flat(lambda: pair.resources(), cycle, num_cycles=50)


def test_endpoints_that_come_and_go_leave_nothing_on_either_side(pair: Pair) -> None:
    cache = shape(num_blocks=4)

    def cycle() -> None:
        near = PeerHost()
        near.open(
            layout=cache.fields,
            num_blocks=4,
            num_arrays=1,
            memory=pair.kind.memory,
            transport=pair.kind.transport,
            seed=1,
        )
        with near.endpoint.connect(pair.remote_opened["addresses"]) as peer:
            peer.get([0], [1])
        near.close()

    check_flat(lambda: pair.resources(), cycle, num_cycles=50)


def test_endpoints_of_one_cache_leave_nothing_with_it(pair: Pair) -> None:
    def cycle() -> None:
        Endpoint(pair.local.cache, transport=pair.kind.transport).close()

    check_flat(resources, cycle, num_cycles=20)


def test_an_endpoint_that_cannot_serve_leaves_nothing(pair: Pair) -> None:
    url = pair.local.endpoint.addresses["init"]
    ports = {"init": int(url.rpartition(":")[2])}

    def cycle() -> None:
        with pytest.raises(NotAvailable, match="in use"):
            Endpoint(pair.local.cache, transport=pair.kind.transport, ports=ports)

    check_flat(resources, cycle, num_cycles=20)


def tasks() -> set[str]:
    """The threads of this process; one that was joined may be there for a moment."""
    return {path.name for path in Path("/proc/self/task").iterdir()}


def test_a_closed_link_keeps_no_mapping_of_the_peers_pages(pair: Pair) -> None:
    before, others = num_segment_mappings(), tasks()
    kept = pair.local.endpoint.connect(pair.remote_opened["addresses"])
    kept.put([0], [1])  # some links start their threads for the first copy
    own = tasks() - others
    kept.close()
    kept.close()
    # The board alone stays, for as long as the object does; so do none of the copying threads.
    assert num_segment_mappings() == before + (pair.kind in ON_ONE_HOST)
    eventually(lambda: bool(own - tasks()), "the copying threads are there")


def test_refused_connections_leave_nothing_on_either_side(pair: Pair) -> None:
    other = shape(head_dim=16)
    near = PeerHost()
    near.open(
        layout=other.fields,
        num_blocks=4,
        num_arrays=1,
        memory=pair.kind.memory,
        transport=pair.kind.transport,
        seed=1,
    )

    def cycle() -> None:
        with pytest.raises(ValueError, match="head_dim"):
            near.endpoint.connect(pair.remote_opened["addresses"])

    try:
        check_flat(lambda: pair.resources(), cycle, num_cycles=50)
    finally:
        near.close()


def test_the_leak_check_fails_on_a_connection_that_is_kept(pair: Pair) -> None:
    kept = []

    def cycle() -> None:
        peer = pair.local.endpoint.connect(pair.remote_opened["addresses"])
        kept.append(peer)

    try:
        with pytest.raises(AssertionError, match=r"leak over 5 cycles.*near fds"):
            check_flat(lambda: pair.resources(), cycle, num_cycles=5, settle_s=0.2)
    finally:
        for peer in kept:
            peer.close()
