"""The parts of the LMCache connector that need no LMCache."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvxfer.connectors.lmcache.agreement import require_agreement
from kvxfer.connectors.lmcache.install import SIGNATURES, VERSIONS, complaints
from kvxfer.connectors.lmcache.options import Options, read_options
from kvxfer.connectors.lmcache.outgoing import Batch, InFlight, mark_failed
from kvxfer.connectors.lmcache.page_store import Form, PageStore
from kvxfer.connectors.lmcache.pool import PagePool, Pages
from kvxfer.connectors.lmcache.splitting import parts_of
from kvxfer.connectors.lmcache.wire import (
    AllocRequest,
    Facts,
    Hello,
    NixlInitRequest,
    decode,
    decode_request,
    encode,
)
from kvxfer.errors import InvalidUsage, LayoutMismatch, ProtocolMismatch
from kvxfer.transport import Op


class StockInit(msgspec.Struct, tag="NixlInitRequest"):
    """As LMCache 0.5.6 has it."""

    local_meta_bytes: bytes


class StockAlloc(msgspec.Struct, tag="AllocRequest"):
    """As LMCache 0.5.6's sync back end has it."""

    keys: list[str]
    fmt: int
    shape: list[int]
    dtype: str
    last_chunk_toks: int


BRACKETS = b"\x82\xa4type\xacAllocRequest\xa4more" + b"\x91" * 100_000  # too deep to be read
FACTS = Facts(
    model="m", world_size=1, worker_id=0, dtype="torch.bfloat16", page_bytes=2 << 20,
    page_shape=[4, 2, 256, 8, 64], probe="m@1@0@ab@bfloat16",
)  # fmt: skip


def test_a_question_is_a_legal_message_to_a_peer_without_kvxfer() -> None:
    asked = NixlInitRequest(local_meta_bytes=b"agent", kvxfer=Hello(addresses={"init": "tcp://x"}))
    assert msgspec.msgpack.decode(encode(asked), type=StockInit) == StockInit(b"agent")
    assert decode(msgspec.msgpack.encode(StockInit(b"agent")), NixlInitRequest).kvxfer is None


def test_requests_of_both_back_ends_are_understood() -> None:
    stock = StockAlloc(["k"], 1, [2, 4, 256, 512], "bfloat16", 232)
    found = decode_request(msgspec.msgpack.encode(stock))
    assert isinstance(found, AllocRequest)
    assert (found.keys, found.req_id, found.kvxfer) == (["k"], "", None)
    assert msgspec.msgpack.decode(encode(found), type=StockAlloc) == stock


def test_who_asks_under_no_name_is_no_asker() -> None:
    # Nobody would ever see the end of what it has.
    unnamed = StockAlloc(["k"], 1, [2, 4, 256, 512], "bfloat16", 232)
    fields = msgspec.to_builtins(unnamed) | {"kvxfer": {"connection": ""}}
    with pytest.raises(ProtocolMismatch, match="connection"):
        decode_request(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("data", [b"", b"garbage", b"\xc1", b"\x80", bytes(100), BRACKETS])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolMismatch, match=f"{len(data)} bytes are no such message"):
        decode_request(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "other"}, "model is 'm' here and 'other' at x"),
        ({"world_size": 2}, "world_size is 1 here and 2 at x; KV is not re-sharded"),
        ({"worker_id": 1}, "worker_id is 0 here and 1 at x"),
        ({"dtype": "torch.float16"}, "dtype is"),
        ({"page_bytes": 4096}, "page_bytes is"),
        ({"page_shape": [1]}, "page_shape is"),
        ({"probe": "m@1@0@cd@bfloat16"}, "PYTHONHASHSEED"),
    ],
)
def test_facts_that_differ_are_named(change: dict[str, Any], words: str) -> None:
    require_agreement(FACTS, FACTS, "x")
    with pytest.raises(LayoutMismatch, match=words.replace("[", r"\[")):
        require_agreement(FACTS, msgspec.structs.replace(FACTS, **change), "x")


def _function(parameters: tuple[str, ...]) -> Callable[..., None]:
    def made() -> None: ...

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    made.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind) for name in parameters]
    )
    return made


def test_a_known_lmcache_is_taken_and_another_is_refused_in_words() -> None:
    def find(name: str) -> Callable[..., None]:
        return _function(SIGNATURES[name])

    for version in VERSIONS:
        assert complaints(version, find) == []
    assert complaints("0.9.9", find) == ["its version is 0.9.9; known are 0.5.2, 0.5.6"]

    def changed(name: str) -> Callable[..., None]:
        if name.endswith("CreateTransferChannel"):
            return _function(("channel_type", "mode"))
        if name.endswith("_abort_request"):
            raise AttributeError("no attribute '_abort_request'")
        return find(name)

    assert complaints(VERSIONS[0], changed) == [
        "CreateTransferChannel takes channel_type, mode",
        "it has no PDBackendAsync._abort_request (no attribute '_abort_request')",
    ]


def test_settings_are_read_from_keys_with_the_prefix() -> None:
    assert read_options(None) == Options()
    assert read_options({"kvxfer.lease_s": 3, "other": 1}).lease_s == 3.0
    for wrong in ({"kvxfer.leese_s": 3}, {"kvxfer.lease_s": -1}, {"kvxfer.peers": "some"}):
        with pytest.raises(InvalidUsage, match=r"known keys are kvxfer\.transport"):
            read_options(wrong)


def test_a_batch_keeps_what_its_request_was_when_it_was_sent() -> None:
    spec = SimpleNamespace(req_id="r", receiver_host="127.0.0.1", is_last_prefill=False)
    first = Batch(spec)
    spec.is_last_prefill = True
    last = Batch(spec)
    assert (first.req_id, first.is_last_prefill, last.is_last_prefill) == ("r", False, True)
    mark_failed(spec)
    assert not last.is_last_prefill  # nobody is told of a request of which a part was lost


def test_receivers_whose_host_and_port_join_to_one_text_have_two_names() -> None:
    hosts = [
        Batch(SimpleNamespace(receiver_host=host)).receiver_host for host in ("h.0.0.1", "h.0.0.11")
    ]
    # As LMCache makes a name, and as it makes an address.
    assert (hosts[0] + "17300", hosts[1] + "7300") == ("h.0.0.1:17300", "h.0.0.11:7300")
    assert f"{hosts[0]}:{17300}" == "h.0.0.1:17300"


def test_a_sender_waits_for_a_page_only_as_long_as_one_can_come() -> None:
    shelf = SimpleNamespace(num_pages=4, page_bytes=10, num_free=lambda: 0)
    in_flight = InFlight()
    with pytest.raises(InvalidUsage, match="more than the 4 pages of 10 bytes"):
        in_flight.await_room(shelf, 1.0)
    in_flight.begin()
    with pytest.raises(TimeoutError):
        in_flight.await_room(shelf, 0.01)


def test_a_store_is_cut_where_the_pool_does_not_hold_it() -> None:
    def cut(first: int, count: int, num_pages: int) -> list[tuple[int, int, bool]]:
        found = parts_of(first, count, chunk_tokens=10, num_pages=num_pages)
        return [(one.start, one.end, one.is_last) for one in found]

    assert cut(0, 35, 4) == [(0, 35, True)]
    assert cut(0, 45, 4) == [(0, 20, False), (20, 40, False), (40, 45, True)]
    assert cut(20, 65, 4) == [(20, 40, False), (40, 60, False), (60, 65, True)]
    assert cut(20, 60, 4) == [(20, 60, True)]
    assert cut(0, 30, 1) == [(0, 10, False), (10, 20, False), (20, 30, True)]
    assert cut(20, 20, 4) == []


def pool_of(pages: np.ndarray[Any, Any]) -> PagePool:
    return PagePool(pages.ctypes.data, pages.nbytes, pages.shape[1], is_device=False)


def aligned(num_pages: int, page_bytes: int) -> np.ndarray[Any, Any]:
    raw = np.zeros(num_pages * page_bytes + 64, np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first : first + num_pages * page_bytes].reshape(num_pages, page_bytes)


def test_a_plan_moves_the_used_bytes_of_each_page() -> None:
    near, far = aligned(4, 4096), aligned(6, 4096)
    near[:] = np.arange(1, 5, dtype=np.uint8)[:, None]
    with pool_of(near) as pool:
        pages = Pages([3, 0, 2], [1, 5, 0], [4096, 4096, 100])
        plan = pool.plan(pages, Op.PUT, far.ctypes.data, 6)
        assert plan.total_bytes == 2 * 4096 + 100
        for box in plan.boxes:
            for src, dst, *_ in plan.segments[box.first_segment :][: box.num_segments]:
                far[dst, : box.run_bytes] = near[src, : box.run_bytes]
    assert (far[1] == 4).all()
    assert (far[5] == 1).all()
    assert (far[0, :100] == 3).all()
    assert not far[0, 100:].any()


@pytest.mark.parametrize(
    ("pages", "error"),
    [
        (Pages([0], [6], [1]), ProtocolMismatch),
        (Pages([0], [-1], [1]), ProtocolMismatch),
        (Pages([4], [0], [1]), ProtocolMismatch),
        (Pages([0, 1], [2, 2], [1, 1]), ProtocolMismatch),
        (Pages([0], [0], [4097]), InvalidUsage),
        (Pages([0], [0], [0]), InvalidUsage),
        (Pages([0, 1], [0], [1, 1]), InvalidUsage),
    ],
)
def test_a_plan_outside_a_pool_is_refused(pages: Pages, error: type[Exception]) -> None:
    near = aligned(4, 4096)
    with pool_of(near) as pool, pytest.raises(error):
        pool.plan(pages, Op.PUT, 1 << 20, 6)


FORM = Form(10, [10], "uint8", 4)


def test_a_store_gives_no_page_away_that_somebody_has() -> None:
    dropped: list[str] = []
    store = PageStore(2, dropped.append)
    for name in "ab":
        assert store.begin(name, FORM, "w") is not None
        assert name not in store
        assert store.finish(name, "w", is_filled=True)
    assert store.hold("a", "r") is not None
    assert store.begin("c", FORM, "w") is not None  # b was the least used that nobody has
    assert dropped == ["b"]
    assert store.begin("d", FORM, "w") is None  # a is read, c is written
    assert store.finish("c", "other", is_filled=True) is False
    store.forget("w")
    assert store.let_go("a", "r")
    assert not store.let_go("a", "r")
    assert list(store.keys()) == ["a"]
    assert dropped == ["b"]
