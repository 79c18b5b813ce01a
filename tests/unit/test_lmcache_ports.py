"""What is answered on the ports, and that nothing makes them deaf; no LMCache in it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq
from free_ports import free_port
from lmcache_grants import PLANTED, UNREADABLE, Setup, Writers

from kvxfer.connectors.lmcache.alloc_port import AllocPort
from kvxfer.connectors.lmcache.page_store import Form, PageStore
from kvxfer.connectors.lmcache.ports import PortServer
from kvxfer.connectors.lmcache.store_port import Ask, StorePort, StoreRequests, Tell
from kvxfer.connectors.lmcache.wire import AllocRequest, AllocResponse, Hello, decode, encode
from kvxfer.control import DeferredReply
from kvxfer.errors import PeerLost

GUARD_S = 60.0
FORM = Form(10, [10], "uint8", 4)


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


def ask(at: str, message: msgspec.Struct) -> bytes:
    with zmq.Context() as context, context.socket(zmq.REQ) as asker:
        asker.setsockopt(zmq.LINGER, 0)
        asker.connect(f"tcp://{at}")
        asker.send(encode(message))
        assert asker.poll(GUARD_S * 1000), "no answer"
        return asker.recv()


class Faulty(PortServer):
    """Whatever is due between messages fails."""

    def idle_ms(self) -> int:
        raise RuntimeError("planted")

    def answer(self, sender: str, message: bytes, reply: Callable[[bytes], None]) -> None:
        reply(message)


def test_a_port_hears_whatever_becomes_of_what_is_due_between_messages() -> None:
    at = free_address()
    with Faulty(at, "faulty") as port:
        port.start()
        hello = Hello(addresses={})
        assert [ask(at, hello) for _ in range(2)] == [encode(hello)] * 2


@pytest.mark.parametrize("key", [UNREADABLE, PLANTED])
def test_a_bad_key_costs_its_sender_an_answer_and_nobody_else_anything(key: str) -> None:
    setup, at = Setup(), free_address()

    def pages(*keys: str) -> list[int]:
        request = AllocRequest(
            keys=list(keys), fmt=2, shape=[1], dtype="uint8", last_chunk_toks=1, is_last_batch=True
        )
        return decode(ask(at, request), AllocResponse).remote_indexes

    with AllocPort(at, setup.arrivals):
        assert pages("a", key) == [-1, -1]
        assert pages("a") == [1]
    assert setup.shelf.num_free() == 7


class Store:
    """A store of four pages that answers on a port."""

    def __init__(self, at: str) -> None:
        self.pages, self.writers, self._at = PageStore(4), Writers(), at
        self.requests = StoreRequests(self.pages, self.writers)
        for number in range(4):
            self.put(f"own-{number}")

    def put(self, name: str) -> bool:
        return self.pages.begin(name, FORM, "w") is not None and self.pages.finish(
            name, "w", is_filled=True
        )

    def ask(self, kind: str, who: str, keys: list[str], num_forms: int = 0) -> Tell:
        return decode(ask(self._at, Ask(kind, who, keys, [FORM] * num_forms)), Tell)  # type: ignore[arg-type]

    def num_free(self) -> int:
        """Pages that somebody else can have."""
        taken = [self.pages.begin(f"try-{number}", FORM, "try") for number in range(4)]
        self.pages.forget("try")
        return sum(page is not None for page in taken)


@contextmanager
def serving() -> Iterator[Store]:
    at = free_address()
    store = Store(at)
    with StorePort(at, store.pages, 4096, Hello(addresses={}), store.requests):
        yield store


KEYS = [f"own-{number}" for number in range(4)]


@pytest.mark.parametrize("kind", ["find", "reserve", "end_read", "end_write", "drop_write"])
def test_who_has_no_connection_to_a_store_is_refused(kind: str) -> None:
    with serving() as store:
        store.writers.unknown.add("nobody")
        refused = store.ask(kind, "nobody", KEYS, num_forms=4)
        assert refused.pages == [-1] * 4
        assert "connection 'nobody' is not known here" in refused.error
        assert store.num_free() == 4


def test_a_question_of_unequal_lists_takes_nothing() -> None:
    with serving() as store:
        refused = store.ask("reserve", "a", ["x", "y", "z"], num_forms=2)
        assert refused.pages == [-1] * 3
        assert refused.error == "3 chunks of 2 forms; give one for each"
        assert store.num_free() == 4


def test_what_was_taken_ends_with_who_took_it() -> None:
    with serving() as store:
        assert -1 not in store.ask("find", "a", KEYS).pages
        assert store.num_free() == 0
        store.requests.tick(0.0)
        assert store.num_free() == 0  # it lives
        store.writers.ended.add("a")
        store.requests.tick(0.0)
        assert store.num_free() == 4


def test_who_watches_a_store_hears_that_it_lives() -> None:
    requests = StoreRequests(PageStore(4), Writers())
    answer = requests.watch("a")
    assert isinstance(answer, DeferredReply)
    requests.tick(time.monotonic() + 60.0)
    assert not answer.is_open


def test_what_is_taken_while_its_connection_ends_is_let_go_of() -> None:
    with serving() as store:
        assert -1 not in store.ask("find", "a", KEYS[:1]).pages
        store.requests.left("a")
        # A question that was under way: the endpoint has not noted the end yet.
        assert -1 not in store.ask("find", "a", KEYS[1:]).pages
        store.writers.ended.add("a")
        store.requests.tick(0.0)
        assert store.num_free() == 4
        with pytest.raises(PeerLost), store.requests.holding("a"):
            pass
