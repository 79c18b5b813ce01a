"""How `ucx` works its slots where pages are a GPU's: rehearsed on host memory, over real UCX.

A side that rehearses passes everything through slots, by plans of rows, with copies that end later
than they were asked for: all that a GPU does but its kernels. tests/gpu has those.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from cache_content import CacheShape, check_content, shape
from contract_cases import CASES
from peer_host import PeerHost
from rank_host import RankHost
from transport_pairs import LOCAL_SEED, REMOTE_SEED, UCX, require_available
from ucx_wire import PIECE, PUT, Box, begin, piece, plan

from kvxfer import Peer, _core
from kvxfer.errors import TransferFailed
from kvxfer.transport import Op, Tuning
from kvxfer.transport.ucx import UcxTransport
from kvxfer.tuning import Slots

SLOT_BYTES = 64 << 10
STALL_S = 30.0


@pytest.fixture(autouse=True)
def _ucx() -> None:
    require_available(UCX)


class Rehearsing(UcxTransport):
    """A side whose pages UCX does not reach."""

    def _settings(self, device: int, slots: Slots) -> _core.UcxSettings:
        return _core.UcxSettings(staging="rehearsal", slot_bytes=SLOT_BYTES, stall_s=STALL_S)


KINDS = {"near": (Rehearsing, UcxTransport), "far": (UcxTransport, Rehearsing)}
KINDS["both"] = (Rehearsing, Rehearsing)

SHAPES = {
    "pages of 128 bytes": shape(num_layers=3, num_blocks=96),
    "pages of 24 KiB": shape(head_dim=96, block_size=64, num_blocks=24),
    "pages of 320 KiB": shape(head_dim=80, block_size=1024, num_blocks=9),
    "pages of 21 bytes": shape(
        num_layers=3, num_kv_heads=1, head_dim=21, block_size=1, dtype="uint8", kv="mla"
    ),
}


def open_side(transport: UcxTransport, cache: CacheShape, seed: int) -> PeerHost:
    host = PeerHost()
    host.open(
        layout=cache.fields,
        num_blocks=cache.num_blocks,
        num_arrays=cache.num_arrays,
        memory="private",
        transport=transport,  # type: ignore[arg-type]
        seed=seed,
    )
    return host


@contextmanager
def linked(kinds: str, cache: CacheShape) -> Iterator[tuple[PeerHost, PeerHost, Peer]]:
    near_kind, far_kind = KINDS[kinds]
    far = open_side(far_kind(2, stall_s=STALL_S), cache, REMOTE_SEED)
    near = open_side(near_kind(2, stall_s=STALL_S), cache, LOCAL_SEED)
    try:
        with near.endpoint.connect(far.endpoint.addresses) as peer:
            yield near, far, peer
    finally:
        near.close()
        far.close()


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("engine", ["direct", "staged"])
@pytest.mark.parametrize("name", SHAPES)
def test_pages_arrive_and_nothing_else(name: str, engine: str, kinds: str) -> None:
    cache = SHAPES[name]
    ids = np.random.default_rng(3).permutation(cache.num_blocks).tolist()
    tuning = Tuning(engine=engine)
    with linked(kinds, cache) as (near, far, peer):
        peer.put(ids, ids[::-1], tuning=tuning)
        near_pages, far_pages = cache.content(LOCAL_SEED), cache.content(REMOTE_SEED)
        expected = cache.copied(near_pages, far_pages, ids, ids[::-1])
        check_content(cache, far.content(), expected)
        peer.get(ids[1:], ids[:-1], tuning=tuning)
        check_content(cache, far.content(), expected)
        got = cache.copied(expected, near_pages, ids[1:], ids[:-1])
        check_content(cache, near.content(), got)


@pytest.mark.parametrize("op", Op, ids=lambda op: op.value)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_exactly_its_bytes(name: str, op: Op) -> None:
    case = CASES[name]
    sides = (case.src, case.dst) if op is Op.PUT else (case.dst, case.src)
    opened: list[RankHost] = []

    def open_ranks(count: int, *, is_source: bool) -> list[RankHost]:
        ranks = [RankHost() for _ in range(count)]
        for rank, host in enumerate(ranks):
            opened.append(host)
            transport: Any = Rehearsing(1, stall_s=STALL_S)
            host.open(
                case=name, rank=rank, is_source=is_source, memory="private", transport=transport
            )
        return ranks

    try:
        far = open_ranks(len(sides[1].ranks), is_source=op is Op.GET)
        addresses = [host.endpoint.addresses for host in far]
        for host in open_ranks(len(sides[0].ranks), is_source=op is Op.PUT):
            with host.endpoint.connect_all(addresses, convert=case.conversion) as group:
                post = group.put if op is Op.PUT else group.get
                post(
                    case.src.table(), case.dst.table(), tokens=case.tokens, layers=case.layers
                ).wait(STALL_S)
        assert [host.problem() for host in opened] == [""] * len(opened)
    finally:
        for host in opened:
            host.close()


def poll_out(native: Any) -> None:
    while not native.poll(0.1):
        pass


BAD_PIECES = {
    "eager data, which has no way in": (piece(), bytes(64)),
    "more than a slot": (piece(), bytes(2 * SLOT_BYTES)),
}


@pytest.mark.parametrize("name", BAD_PIECES)
def test_pieces_that_need_no_slot_are_refused(name: str) -> None:
    header, data = BAD_PIECES[name]
    cache = SHAPES["pages of 320 KiB"]
    with linked("both", cache) as (_, far, peer):
        native = peer.link._native  # type: ignore[attr-defined]
        address = int(peer.link.region_addresses[0])
        tables = plan([address], [Box(len(data))])
        native.send_raw(PUT, begin(), tables)
        native.send_raw(PIECE, header, data)
        with pytest.raises(TransferFailed, match="the peer sent a piece"):
            poll_out(native)
        check_content(cache, far.content(), cache.content(REMOTE_SEED))


def test_a_copy_of_rows_that_is_left_out_would_be_seen() -> None:
    cache = SHAPES["pages of 128 bytes"]
    ids = list(range(cache.num_blocks))
    with linked("both", cache) as (_, far, peer):
        peer.put(ids[1:], ids[1:])
        whole = cache.copied(cache.content(LOCAL_SEED), cache.content(REMOTE_SEED), ids, ids)
        with pytest.raises(AssertionError, match="block 0"):
            check_content(cache, far.content(), whole)
