"""LMCache's PD transfer on kvxfer's channel, between real engines on CPU.

The set-ups are those in which LMCache's own channel blocks, loses pages or calls a hit what was
never written; each says here what happens instead.
"""

import importlib.util
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

if importlib.util.find_spec("lmcache") is None:
    pytest.skip("LMCache is not installed", allow_module_level=True)

import msgspec
import zmq
from free_ports import free_port, free_ports
from lmcache_pairs import HOST, MODES, NUM_PAGES, PAGE_BYTES, Hosts, Pair
from peer_process import RemoteError

from kvxfer.connectors.lmcache.wire import AllocRequest, AllocResponse, Asker, decode, encode

# The tests of kvxfer's own peers do without NIXL; those of stock peers have a file of their own.
KVXFER_ONLY = {"kvxfer.peers": "kvxfer", "kvxfer.connect_timeout_s": 15.0}
IMPATIENT = KVXFER_ONLY | {"kvxfer.connect_timeout_s": 5.0}
TOKENS, CHUNKS = 1000, 4
PORTS = ("init", "alloc")

pytestmark = pytest.mark.timeout(600)
MakePair = Callable[..., Pair]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    made = Hosts(2)
    yield made
    made.close()


@pytest.fixture(params=MODES)
def new_pair(request: pytest.FixtureRequest, hosts: Hosts) -> Iterator[MakePair]:
    made: list[Pair] = []

    def make(**common: Any) -> Pair:
        made.append(Pair(hosts, request.param, **({"extra": KVXFER_ONLY} | common)))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def store(sender: Any, pair: Pair, number: int, **more: Any) -> str:
    """Store 1000 tokens that no other number has; their content is of that number."""
    return str(
        sender.call(
            "store",
            first=number * TOKENS,
            count=TOKENS,
            spec=pair.spec(f"r{number}", **more),
            seed=number,
        )
    )


def retrieve(receiver: Any, number: int) -> dict[str, int]:
    found: dict[str, int] = receiver.call(
        "retrieve", first=number * TOKENS, count=TOKENS, seed=number
    )
    return found


def lookup(receiver: Any, number: int) -> int:
    return int(receiver.call("lookup", first=number * TOKENS, count=TOKENS))


def test_every_byte_arrives_and_the_pages_come_back(new_pair: MakePair) -> None:
    pair = new_pair()
    receiver, sender = pair.receiver(), pair.sender()
    assert {receiver.channel, sender.channel} == {"KvxferChannel"}
    # Ten times what the receiver's pool holds: 32 pages, 4 a request.
    for number in range(80):
        assert store(sender, pair, number) == "ok"
        assert pair.proxy.hear() == f"r{number}"
        assert lookup(receiver, number) == TOKENS
        # A chunk of 232 tokens moves as much, not a page.
        assert retrieve(receiver, number) == {
            "tokens": TOKENS,
            "wrong": 0,
            "bytes": TOKENS * 8192,
        }
    assert receiver.call("free_pages") == sender.call("free_pages") == NUM_PAGES
    assert sender.call("moved_bytes") == 80 * TOKENS * 8192


def test_what_is_not_fetched_gives_way_to_what_comes(new_pair: MakePair) -> None:
    pair = new_pair(extra=KVXFER_ONLY | {"kvxfer.lease_s": 0.5})
    receiver, sender = pair.receiver(), pair.sender()
    for number in range(12):  # 48 pages of 32; nobody fetches
        assert store(sender, pair, number) == "ok"
        assert pair.proxy.hear() == f"r{number}"
    assert retrieve(receiver, 11)["tokens"] == TOKENS
    assert retrieve(receiver, 11)["wrong"] == 0
    assert lookup(receiver, 0) == 0


def test_an_absent_receiver_is_an_error_in_time(new_pair: MakePair) -> None:
    pair = new_pair(extra=IMPATIENT)
    sender = pair.sender()
    outcome = store(sender, pair, 0)
    assert outcome.startswith("ControlTimeout")
    assert f"{HOST}:{pair.init_port}" in outcome
    assert sender.call("free_pages", wanted=NUM_PAGES) == NUM_PAGES


def test_a_receiver_that_dies_costs_an_error_and_no_page(new_pair: MakePair) -> None:
    pair = new_pair(extra=IMPATIENT)
    receiver, sender = pair.receiver(), pair.sender()
    assert store(sender, pair, 0) == "ok"
    assert pair.proxy.hear() == "r0"
    receiver.kill()
    for number in range(1, 4):
        assert store(sender, pair, number) != "blocked"
    assert sender.call("free_pages", wanted=NUM_PAGES) == NUM_PAGES
    assert pair.proxy.hear(0.5) is None


def test_a_receiver_that_was_started_anew_is_met_again(new_pair: MakePair) -> None:
    pair = new_pair()
    receiver, sender = pair.receiver(), pair.sender()
    assert store(sender, pair, 0) == "ok"
    assert pair.proxy.hear() == "r0"
    receiver.kill()
    receiver = pair.receiver()
    for number in (1, 2):
        assert store(sender, pair, number) == "ok"
        assert pair.proxy.hear() == f"r{number}"
        assert retrieve(receiver, number) == {"tokens": TOKENS, "wrong": 0, "bytes": TOKENS * 8192}
    assert receiver.call("free_pages") == sender.call("free_pages") == NUM_PAGES


def test_a_failed_write_is_no_hit_and_its_retry_is_written(new_pair: MakePair) -> None:
    pair = new_pair()
    receiver, sender = pair.receiver(), pair.sender()
    assert store(sender, pair, 0) == "ok"
    assert pair.proxy.hear() == "r0"
    sender.call("fail_next_write")
    assert store(sender, pair, 1) == "ok"  # LMCache's store does not wait for its transfer
    assert pair.proxy.hear(1.0) is None
    assert lookup(receiver, 1) == 0
    assert sender.call("free_pages", wanted=NUM_PAGES) == NUM_PAGES
    assert receiver.call("free_pages", wanted=NUM_PAGES - CHUNKS) == NUM_PAGES - CHUNKS
    assert store(sender, pair, 1) == "ok"
    assert pair.proxy.hear() == "r1"
    assert retrieve(receiver, 1) == {"tokens": TOKENS, "wrong": 0, "bytes": TOKENS * 8192}


def test_a_key_is_no_hit_while_its_bytes_are_on_the_way(new_pair: MakePair) -> None:
    pair = new_pair()
    receiver, sender = pair.receiver(), pair.sender()
    assert store(sender, pair, 0) == "ok"
    assert pair.proxy.hear() == "r0"
    sender.call("hold_next_write")
    assert store(sender, pair, 1) == "ok"
    assert receiver.call("free_pages", wanted=NUM_PAGES - 2 * CHUNKS) == NUM_PAGES - 2 * CHUNKS
    assert lookup(receiver, 1) == 0
    sender.call("let_go")
    assert pair.proxy.hear() == "r1"
    assert lookup(receiver, 1) == TOKENS


def test_a_key_is_a_hit_for_who_looks_the_moment_it_has_arrived(new_pair: MakePair) -> None:
    pair = new_pair()
    receiver, sender = pair.receiver(), pair.sender()
    receiver.call("see_nothing_arrive")
    assert store(sender, pair, 0) == "ok"
    assert pair.proxy.hear() == "r0"
    assert lookup(receiver, 0) == 0
    assert receiver.call("lookup_as_it_arrives", first=0, count=TOKENS) == TOKENS
    assert retrieve(receiver, 0) == {"tokens": TOKENS, "wrong": 0, "bytes": TOKENS * 8192}


@pytest.mark.parametrize("port", ["init_port", "alloc_port"])
def test_malformed_messages_cost_themselves_alone(new_pair: MakePair, port: str) -> None:
    pair = new_pair()
    receiver, sender = pair.receiver(), pair.sender()
    with zmq.Context() as context:
        for message in (b"garbage", b"", b"\xc1", b"\x82\xa4type\xa3foo", bytes(1 << 20)):
            with context.socket(zmq.REQ) as asker:
                asker.setsockopt(zmq.LINGER, 0)
                asker.connect(f"tcp://{HOST}:{getattr(pair, port)}")
                asker.send(message)
                asker.poll(50)
    with socket.create_connection((HOST, getattr(pair, port))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert store(sender, pair, 0) == "ok"
    assert pair.proxy.hear() == "r0"
    assert retrieve(receiver, 0)["wrong"] == 0


# As of another release, which has a dtype more, and of a model whose name has an "@".
@pytest.mark.parametrize("key", ["m@1@0@ff@nosuchdtype", "org/m@rev1@1@0@ff@bfloat16", "garbage"])
def test_a_key_that_nobody_can_read_is_refused_with_its_reason(
    new_pair: MakePair, key: str
) -> None:
    pair = new_pair()
    receiver, sender = pair.receiver(), pair.sender()
    request = AllocRequest(
        keys=[*receiver.call("keys", first=0, count=256), key],
        fmt=1,
        shape=[4, 2, 256, 512],
        dtype="bfloat16",
        last_chunk_toks=256,
        kvxfer=Asker(connection="test"),
    )
    answer = decode(ask(pair.alloc_port, encode(request)), AllocResponse)
    assert answer.remote_indexes == [-1, -1]
    assert answer.kvxfer is not None
    assert f"{key!r} is no key of this LMCache" in answer.kvxfer.error
    assert receiver.call("free_pages") == NUM_PAGES
    assert store(sender, pair, 0) == "ok"
    assert pair.proxy.hear() == "r0"


def test_the_query_port_answers_whatever_it_is_asked(hosts: Hosts) -> None:
    pair = Pair(hosts, "sync", extra=KVXFER_ONLY)
    port = free_port()
    try:
        receiver, sender = pair.receiver(config={"pd_peer_query_port": [port]}), pair.sender()
        assert store(sender, pair, 0) == "ok"
        assert pair.proxy.hear() == "r0"
        (good,) = receiver.call("keys", first=0, count=256)
        for keys, found in (([good, "garbage"], []), ([good, good + "0"], []), ([good], [good])):
            query = {"type": "CacheQueryRequest", "keys": keys}
            answer = msgspec.msgpack.decode(ask(port, msgspec.msgpack.encode(query)))
            assert answer["cached_keys"] == found
    finally:
        pair.close()


def ask(port: int, message: bytes) -> bytes:
    with zmq.Context() as context, context.socket(zmq.REQ) as asker:
        asker.setsockopt(zmq.LINGER, 0)
        asker.connect(f"tcp://{HOST}:{port}")
        asker.send(message)
        assert asker.poll(60_000), "no answer"
        return asker.recv()


@pytest.mark.parametrize("port", ["init_port", "alloc_port"])
def test_a_taken_port_is_an_error_of_the_start(new_pair: MakePair, port: str) -> None:
    pair = new_pair()
    number = getattr(pair, port)
    with socket.socket() as taken:
        taken.bind((HOST, number))
        taken.listen()
        with pytest.raises(RemoteError, match=str(number)) as caught:
            pair.receiver()
    assert caught.value.kind == "NotAvailable"


def test_closing_ends_all_four_roles_and_frees_the_ports(new_pair: MakePair) -> None:
    pair = new_pair()
    for number in range(2):  # the second pair has the ports of the first
        receiver, sender = pair.receiver(), pair.sender()
        assert store(sender, pair, number) == "ok"
        assert pair.proxy.hear() == f"r{number}"
        for side in (sender, receiver):
            assert side.call("shut") >= 0
            assert side.call("held") == []
            assert side.call("shut") >= 0


def test_unequal_numbers_of_ranks_are_refused_at_first_contact(new_pair: MakePair) -> None:
    pair = new_pair()
    receiver, sender = pair.receiver(), pair.sender(world_size=2)
    outcome = store(sender, pair, 0)
    assert outcome.startswith("LayoutMismatch")
    assert "world_size is 2 here and 1 at" in outcome
    assert receiver.call("free_pages") == NUM_PAGES
    assert sender.call("free_pages", wanted=NUM_PAGES) == NUM_PAGES
    assert pair.proxy.hear(0.3) is None


def test_a_rank_without_a_port_is_refused(new_pair: MakePair) -> None:
    pair = new_pair()
    sender = pair.sender(world_size=2, worker_id=1)
    outcome = store(sender, pair, 0)
    assert outcome.startswith("InvalidUsage")
    assert "names 1 ports in receiver_init_port; this is rank 1 of 2" in outcome


def test_other_hashes_are_refused_at_first_contact(new_pair: MakePair) -> None:
    pair = new_pair()
    receiver, sender = pair.receiver(), pair.sender()
    sender.call("hash_otherwise")  # as another PYTHONHASHSEED does where vLLM seeds the chain
    outcome = store(sender, pair, 0)
    assert outcome.startswith("LayoutMismatch")
    assert "PYTHONHASHSEED" in outcome
    assert receiver.call("free_pages") == NUM_PAGES


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="LMCache hashes by vLLM's seed, of no vLLM here",
)
def test_other_seeds_of_two_interpreters_are_refused(new_pair: MakePair) -> None:
    pair = new_pair()
    receiver, sender = pair.receiver(), pair.sender(env={"PYTHONHASHSEED": "1"})
    outcome = store(sender, pair, 0)
    assert outcome.startswith("LayoutMismatch")
    assert "PYTHONHASHSEED" in outcome
    assert receiver.call("free_pages") == NUM_PAGES


def test_a_store_that_exceeds_the_senders_pool_goes_out_in_parts(new_pair: MakePair) -> None:
    pair = new_pair()
    receiver = pair.receiver(config={"pd_buffer_size": 64 * PAGE_BYTES})
    sender = pair.sender()
    count = 75 * 256 - 100  # 50 chunks and a short one behind 24 that are stored already
    big = pair.spec("big", 51)
    assert sender.call("store", first=0, count=count, skip=24 * 256, spec=big) == "ok"
    assert pair.proxy.hear() == "big"
    assert pair.proxy.hear(0.3) is None
    assert receiver.call("num_keys") == 51
    assert sender.call("free_pages", wanted=NUM_PAGES) == NUM_PAGES
    assert sender.call("moved_bytes") == (51 * 256 - 100) * 8192


def test_a_store_that_exceeds_the_receivers_pool_sends_nothing(new_pair: MakePair) -> None:
    pair = new_pair()
    receiver, sender = pair.receiver(), pair.sender()
    sender.call("store", first=0, count=40 * 256, spec=pair.spec("big", 40))
    assert pair.proxy.hear(1.0) is None
    assert receiver.call("num_keys") == 0
    assert receiver.call("free_pages", wanted=NUM_PAGES) == NUM_PAGES
    assert sender.call("free_pages", wanted=NUM_PAGES) == NUM_PAGES
    assert store(sender, pair, 1) == "ok"
    assert pair.proxy.hear() == "r1"


def test_a_request_without_a_receiver_stays_at_home(new_pair: MakePair) -> None:
    pair = new_pair()
    sender = pair.sender()
    assert sender.call("store", first=0, count=TOKENS, spec=None) == "ok"
    assert sender.call("free_pages", wanted=NUM_PAGES) == NUM_PAGES


def test_each_of_two_receivers_gets_its_own_though_lmcache_gives_them_one_id(
    new_pair: MakePair,
) -> None:
    # 127.0.0.1 with port 1xxxx and 127.0.0.11 with port xxxx are one id to LMCache.
    pair = new_pair()
    # At random, as tests of the other mode look for one at the same time.
    init = next(port for port in random.sample(range(12_000, 20_000), 100) if both_are_free(port))
    hosts, inits = (HOST, "127.0.0.11"), (init, init - 10000)
    receivers = []
    for host, port in zip(hosts, inits, strict=True):
        ports = {"pd_peer_init_port": [port], "pd_peer_alloc_port": free_ports(1, host)}
        receivers.append(pair.receiver(config={"pd_peer_host": host, **ports}))
    sender = pair.sender()
    for number, receiver in enumerate(receivers):
        where = {f"receiver_{name}_port": receiver.config[f"pd_peer_{name}_port"] for name in PORTS}
        outcome = store(sender, pair, number, receiver_host=hosts[number], **where)
        assert outcome == "ok"
        assert pair.proxy.hear() == f"r{number}"
        assert receiver.call("num_keys") == CHUNKS
        assert retrieve(receiver, number) == {"tokens": TOKENS, "wrong": 0, "bytes": TOKENS * 8192}


def both_are_free(port: int) -> bool:
    """Whether nobody listens where the two receivers with one id would."""
    with socket.socket() as first, socket.socket() as second:
        try:
            first.bind((HOST, port))
            second.bind(("127.0.0.11", port - 10000))
        except OSError:
            return False
    return True
