"""Answers that come later, from another thread, and what becomes of those that nobody waits for."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from kvxfer.control import ControlClient, ControlServer, DeferredReply, encode
from kvxfer.control import _pending as pending
from kvxfer.control._callers import Callers
from kvxfer.control.framing import encode_limit
from kvxfer.errors import ControlTimeout, InvalidUsage, NotAvailable, PeerLost

GUARD_S = 20.0  # far above what is waited for; it only keeps a failure from hanging


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    number: int


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    number: int


class Scheduler:
    """Owes every answer to a negative number, and gives the others at once."""

    def __init__(self) -> None:
        self.owed: dict[int, DeferredReply] = {}
        self.abandoned: list[int] = []

    def ask(self, message: Ask) -> Answer | DeferredReply:
        if message.number >= 0:
            return Answer(message.number)
        number = message.number
        self.owed[number] = DeferredReply(on_abandoned=lambda: self.abandoned.append(number))
        return self.owed[number]


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def server(scheduler: Scheduler) -> Iterator[ControlServer]:
    with ControlServer({"ask": {Ask: scheduler.ask}}) as running:
        yield running


@pytest.fixture
def client(server: ControlServer) -> Iterator[ControlClient[Answer]]:
    with ControlClient(server.addresses["ask"], Answer, deadline_s=GUARD_S) as made:
        yield made


def until(condition: Callable[[], Any]) -> None:
    end_s = time.monotonic() + GUARD_S
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.002)
    assert condition()


def connected(server: ControlServer) -> bool:
    """Whether libzmq would still send to the only caller; the server's thread finds out."""
    callers = server._channels[0].callers
    found: queue.Queue[bool] = queue.Queue()
    server._post(lambda: found.put(callers._is_connected(next(iter(callers._callers)))))
    return found.get(timeout=GUARD_S)


class Call:
    """A call in a thread of its own, and how it ended."""

    def __init__(self, client: ControlClient[Answer], number: int, deadline_s: float) -> None:
        self.result: Any = None
        self._thread = threading.Thread(target=self._run, args=(client, number, deadline_s))
        self._thread.start()

    def _run(self, client: ControlClient[Answer], number: int, deadline_s: float) -> None:
        try:
            self.result = client.call(Ask(number), deadline_s=deadline_s)
        except Exception as error:
            self.result = error

    def end(self) -> Any:
        self._thread.join(GUARD_S)
        assert not self._thread.is_alive()
        return self.result


def test_an_answer_from_another_thread_while_others_are_served(
    server: ControlServer, client: ControlClient[Answer], scheduler: Scheduler
) -> None:
    with ControlClient(server.addresses["ask"], Answer) as other:
        call = Call(other, -1, GUARD_S)
        until(lambda: -1 in scheduler.owed)
        assert client.call(Ask(5)) == Answer(5)
        assert server.num_pending == {"ask": 1}
        assert scheduler.owed[-1].is_open
        assert scheduler.owed[-1].complete(Answer(77))
        assert call.end() == Answer(77)
    assert not scheduler.owed[-1].is_open
    until(lambda: server.num_pending == {"ask": 0})
    assert scheduler.abandoned == []


def test_answers_may_overtake_each_other(server: ControlServer, scheduler: Scheduler) -> None:
    numbers = [-1, -2, -3, -4]
    clients = [ControlClient(server.addresses["ask"], Answer) for _ in numbers]
    calls = [Call(one, number, GUARD_S) for one, number in zip(clients, numbers, strict=True)]
    until(lambda: len(scheduler.owed) == len(numbers))
    for number in sorted(numbers):
        scheduler.owed[number].complete(Answer(number))
    assert [call.end() for call in calls] == [Answer(number) for number in numbers]
    for one in clients:
        one.close()


def test_completed_before_the_handler_returns(scheduler: Scheduler) -> None:
    def ask(message: Ask) -> DeferredReply:
        answer = DeferredReply()
        assert answer.complete(Answer(message.number + 1))
        return answer

    with (
        ControlServer({"ask": {Ask: ask}}) as server,
        ControlClient(server.addresses["ask"], Answer, deadline_s=GUARD_S) as client,
    ):
        assert [client.call(Ask(n)).number for n in range(50)] == list(range(1, 51))
        assert server.num_pending == {"ask": 0}


def test_a_failure_is_raised_at_the_caller(
    client: ControlClient[Answer], scheduler: Scheduler
) -> None:
    call = Call(client, -1, GUARD_S)
    until(lambda: -1 in scheduler.owed)
    assert scheduler.owed[-1].fail(NotAvailable("no blocks today", 5))
    error = call.end()
    assert type(error) is NotAvailable
    assert "no blocks today" in str(error)


def test_only_the_first_answer_counts_and_rubbish_is_no_answer(
    client: ControlClient[Answer], scheduler: Scheduler
) -> None:
    call = Call(client, -1, GUARD_S)
    until(lambda: -1 in scheduler.owed)
    answer = scheduler.owed[-1]
    with pytest.raises(InvalidUsage, match="is a message, not 3"):
        answer.complete(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidUsage, match="cannot be encoded"):
        answer.complete(Answer(1 << 65))
    assert [answer.complete(Answer(1)), answer.complete(Answer(2))] == [True, False]
    assert not answer.fail(NotAvailable("late"))
    assert call.end() == Answer(1)


def test_the_deadline_of_the_caller_bounds_it(
    server: ControlServer, client: ControlClient[Answer], scheduler: Scheduler
) -> None:
    while not scheduler.owed:  # one that comes too late is not begun
        with pytest.raises(ControlTimeout):
            client.call(Ask(-1), deadline_s=0.1)
    until(lambda: scheduler.abandoned == [-1])
    assert server.num_pending == {"ask": 0}
    assert not scheduler.owed[-1].complete(Answer(0))
    assert client.call(Ask(4)) == Answer(4)


def test_a_caller_that_has_gone_frees_what_it_waited_for(
    server: ControlServer, client: ControlClient[Answer], scheduler: Scheduler
) -> None:
    gone = ControlClient(server.addresses["ask"], Answer)
    call = Call(gone, -1, 600.0)
    until(lambda: -1 in scheduler.owed)
    gone.close()
    assert isinstance(call.end(), InvalidUsage)
    until(lambda: scheduler.abandoned == [-1])
    assert server.num_pending == {"ask": 0}
    assert not scheduler.owed[-1].complete(Answer(0))
    assert client.call(Ask(4)) == Answer(4)


def test_an_answer_to_a_caller_that_has_gone_unheard_is_given_back(
    monkeypatch: pytest.MonkeyPatch, server: ControlServer, scheduler: Scheduler
) -> None:
    monkeypatch.setattr(Callers, "_suspect", lambda *_: None)
    gone = ControlClient(server.addresses["ask"], Answer)
    call = Call(gone, -1, 600.0)
    until(lambda: -1 in scheduler.owed)
    gone.close()
    call.end()
    until(lambda: not connected(server))
    assert scheduler.owed[-1].complete(Answer(0))
    until(lambda: scheduler.abandoned == [-1])
    assert server.undelivered == {"ask": 1}
    assert len(server._channels[0].callers) == 0


def test_a_server_that_closes_frees_what_it_owes(scheduler: Scheduler) -> None:
    server = ControlServer({"ask": {Ask: scheduler.ask}})
    with ControlClient(server.addresses["ask"], Answer) as client:
        call = Call(client, -1, GUARD_S)
        until(lambda: -1 in scheduler.owed)
        server.close()
        assert scheduler.abandoned == [-1]
        assert not scheduler.owed[-1].complete(Answer(0))
        assert isinstance(call.end(), PeerLost)


def test_an_exception_on_abandoning_stops_nothing() -> None:
    def ask(message: Ask) -> Answer | DeferredReply:
        return Answer(0) if message.number else DeferredReply(on_abandoned=lambda: 1 // 0)

    with (
        ControlServer({"ask": {Ask: ask}}) as server,
        ControlClient(server.addresses["ask"], Answer) as client,
    ):
        with pytest.raises(ControlTimeout):
            client.call(Ask(0), deadline_s=0.05)
        until(lambda: server.num_pending == {"ask": 0})
        assert client.call(Ask(1), deadline_s=GUARD_S) == Answer(0)


@pytest.mark.parametrize(
    ("limit", "text"),
    [("MAX_PENDING_OF_A_CALLER", "owed to this caller"), ("MAX_PENDING", "are owed already")],
)
def test_no_more_are_owed_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
    server: ControlServer,
    client: ControlClient[Answer],
    scheduler: Scheduler,
    limit: str,
    text: str,
) -> None:
    monkeypatch.setattr(pending, limit, 3)
    context = zmq.Context()
    greedy = context.socket(zmq.DEALER)
    greedy.connect(server.addresses["ask"])
    for number in range(1, 6):
        parts = [bytes([number]), *encode(Ask(-number)), encode_limit(GUARD_S)]
        greedy.send_multipart(parts)
    for number in (4, 5):
        assert greedy.poll(int(GUARD_S * 1000))
        call_id, _, body = greedy.recv_multipart()
        assert call_id == bytes([number])
        assert b"NotAvailable" in body
        assert text.encode() in body
    until(lambda: scheduler.abandoned == [-4, -5])
    assert server.num_pending == {"ask": 3}
    assert client.call(Ask(1)) == Answer(1)
    for number in (1, 2, 3):
        assert scheduler.owed[-number].complete(Answer(number))
    assert [greedy.recv_multipart()[0] for _ in range(3)] == [b"\x01", b"\x02", b"\x03"]
    context.destroy(linger=0)


def owed(caller: bytes, end_s: float) -> pending.Owed:
    return pending.Owed(caller, b"id", DeferredReply(), end_s)


def test_the_book_of_what_is_owed() -> None:
    book = pending.Pending()
    assert book.next_end_s == float("inf")
    tickets = [book.add(owed(bytes([n % 2]), float(10 - n))) for n in range(6)]
    assert (len(book), book.next_end_s) == (6, 5.0)
    assert book.take(tickets[5]) is not None
    assert book.take(tickets[5]) is None
    assert book.next_end_s == 6.0
    assert [one.end_s for one in book.take_late(7.0)] == [6.0, 7.0]
    assert [one.end_s for one in book.take_of(b"\x00")] == [10.0, 8.0]
    assert book.take_of(b"\x00") == []
    assert [one.end_s for one in book.take_all()] == [9.0]
    assert (len(book), book.next_end_s) == (0, float("inf"))


def test_the_book_forgets_what_was_taken() -> None:
    book = pending.Pending()
    for _ in range(10_000):
        book.take(book.add(owed(b"a", 1e9)))
    assert len(book._ends) <= 4 * pending.MAX_PENDING_OF_A_CALLER
    assert not book._of_caller
