"""Many calls from one thread: answers, deadlines, and connections that end."""

import errno
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from descriptors import few_descriptors
from leaks import num_fds
from waiting import eventually

from kvxfer.control import CommitRequest, ControlServer, DeferredReply, Done, ReserveReply
from kvxfer.control.calls import Calls, Line
from kvxfer.errors import (
    ControlTimeout,
    InvalidUsage,
    NotAvailable,
    PeerLost,
    ProtocolMismatch,
)

GUARD_S = 60.0


class Server:
    """Answers commits by their names: now, later (when told), never, with an error, or wrongly."""

    def __init__(self) -> None:
        self.owed: list[DeferredReply] = []
        self.seen: list[str] = []
        self.server = ControlServer({"alloc": {CommitRequest: self._answer}})
        self.address = self.server.addresses["alloc"]

    def _answer(self, request: CommitRequest) -> Any:
        self.seen.append(request.request_id)
        kind = request.request_id.partition("-")[0]
        if kind == "bad":
            raise InvalidUsage("not like this")
        if kind == "wrong":
            return ReserveReply(request_id="x", state="wait")
        if kind in ("later", "never"):
            self.owed.append(DeferredReply())
            return self.owed[-1]
        return Done(request.request_id)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.server.close()


@pytest.fixture
def calls() -> Iterator[Calls]:
    made = Calls()
    yield made
    made.close()


def ask(line: Line, name: str, deadline_s: float = GUARD_S) -> list[Any]:
    """Start a call; what it is answered with is appended to the list."""
    answers: list[Any] = []
    line.start(CommitRequest(name), deadline_s=deadline_s, on_answer=answers.append)
    return answers


def run_until(calls: Calls, *awaited: list[Any]) -> None:
    end_s = time.monotonic() + GUARD_S
    while not all(awaited):
        assert time.monotonic() < end_s, awaited
        calls.run(0.1)


def test_answers_find_their_calls(server: Server, calls: Calls) -> None:
    line = calls.open(server.address, Done)
    later, bad, wrong = ask(line, "later"), ask(line, "bad"), ask(line, "wrong")
    many = [ask(line, f"now-{number}") for number in range(100)]
    run_until(calls, bad, wrong, *many)
    assert [one[0].request_id for one in many] == [f"now-{number}" for number in range(100)]
    assert isinstance(bad[0], InvalidUsage)
    assert "not like this" in str(bad[0])
    assert isinstance(wrong[0], ProtocolMismatch)
    assert later == []
    server.owed[0].complete(Done("at last"))
    run_until(calls, later)
    assert later[0].request_id == "at last"


def test_calls_to_an_absent_peer_keep_no_other_waiting(server: Server, calls: Calls) -> None:
    absent = calls.open("tcp://127.0.0.1:9", Done)
    line = calls.open(server.address, Done)
    missing = ask(absent, "now")
    run_until(calls, ask(line, "now"))
    assert missing == []
    missing = ask(absent, "now", 0.3)
    run_until(calls, missing)
    assert isinstance(missing[0], ControlTimeout)
    assert "nothing was sent" in str(missing[0])


def test_a_call_that_is_not_answered_ends_at_its_deadline(server: Server, calls: Calls) -> None:
    line = calls.open(server.address, Done)
    while not server.owed:  # one that comes too late is not begun
        answers = ask(line, "never", 0.3)
        run_until(calls, answers)
    assert "its outcome is unknown" in str(answers[0])
    server.owed[0].complete(Done("too late"))
    run_until(calls, ask(line, "now"))
    assert len(answers) == 1


def test_a_call_behind_others_is_not_late_because_they_take_their_time(
    server: Server, calls: Calls
) -> None:
    line = calls.open(server.address, Done)
    first = [ask(line, f"later-{number}") for number in range(16)]
    behind = ask(line, "now", deadline_s=0.2)
    end_s = time.monotonic() + 0.4
    while len(server.owed) < 16 or time.monotonic() < end_s:
        assert time.monotonic() < end_s + GUARD_S
        calls.run(0.1)
    assert behind == []
    server.owed[0].complete(Done("later-0"))
    run_until(calls, first[0], behind)
    assert behind == [Done("now")]


def test_the_end_of_a_connection_ends_its_calls(server: Server, calls: Calls) -> None:
    line = calls.open(server.address, Done)
    lost: list[int] = []
    line.on_lost = lambda: lost.append(1)
    answers = ask(line, "never")
    while not server.owed:
        calls.run(0.05)
    server.server.close()
    run_until(calls, answers, lost)
    assert isinstance(answers[0], PeerLost)
    assert lost == [1]


def test_a_line_that_is_dropped_sends_nothing_more(server: Server, calls: Calls) -> None:
    line = calls.open(server.address, Done)
    # Before the connection stands: they wait to be sent.
    answers = [ask(line, f"now-{number}") for number in range(20)]
    calls.drop(line)
    calls.drop(line)
    again = calls.open(server.address, Done)
    run_until(calls, ask(again, "now-fresh"))
    assert server.seen == ["now-fresh"]
    assert not any(answers)
    assert calls.num_lines == 1


def test_an_answer_may_drop_its_own_line(server: Server, calls: Calls) -> None:
    line = calls.open(server.address, Done)
    heard: list[Any] = []

    def take(answer: Any) -> None:
        heard.append(answer)
        calls.drop(line)

    for number in range(5):
        line.start(CommitRequest(f"now-{number}"), deadline_s=GUARD_S, on_answer=take)
    run_until(calls, heard)
    calls.run(0.05)
    assert len(heard) == 1


def test_another_thread_ends_the_wait(calls: Calls) -> None:
    timer = threading.Timer(0.05, calls.wake)
    timer.start()
    begun_s = time.monotonic()
    calls.run(GUARD_S)
    assert time.monotonic() - begun_s < GUARD_S
    timer.join()
    calls.wake()
    calls.run(GUARD_S)


def test_wrong_addresses_are_refused(calls: Calls) -> None:
    with pytest.raises(InvalidUsage, match="is not an address"):
        calls.open("http://127.0.0.1:80", Done)
    assert calls.num_lines == 0


def test_a_line_for_which_descriptors_are_short_leaves_none_behind(calls: Calls) -> None:
    calls.drop(calls.open("tcp://127.0.0.1:1", Done))  # with the context's own
    before = num_fds()
    for num_left in range(2):
        with few_descriptors(num_left):
            with pytest.raises(NotAvailable, match=r"Too many open files; RLIMIT_NOFILE is") as got:
                calls.open("tcp://127.0.0.1:1", Done)
            assert got.value.code == errno.EMFILE
    assert calls.num_lines == 0
    eventually(lambda: num_fds() <= before, "sockets were left open")
