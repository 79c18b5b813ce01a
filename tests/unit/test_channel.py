"""Control channels between a server and clients that behave."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from free_ports import free_port

from kvxfer import errors
from kvxfer.control import CommitRequest, ControlClient, ControlServer, Done
from kvxfer.errors import ControlTimeout, InvalidUsage, NotAvailable, PeerLost, ProtocolMismatch

HANG_GUARD_S = 20.0  # far above any bound under test; it only keeps a failure from hanging


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    number: int


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    number: int


def serve(**options: object) -> ControlServer:
    channels = {
        "alloc": {CommitRequest: lambda message: Done(message.request_id)},
        "ask": {Ask: lambda message: Answer(message.number + 1)},
    }
    return ControlServer(channels, **options)  # type: ignore[arg-type]


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with serve() as running:
        yield running


def run_in_thread(target: object) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_each_channel_answers_with_its_own_types(server: ControlServer) -> None:
    assert set(server.addresses) == {"alloc", "ask"}
    assert len(set(server.addresses.values())) == 2
    with ControlClient(server.addresses["alloc"], Done) as alloc:
        assert alloc.call(CommitRequest("r-1")) == Done("r-1")
    with ControlClient(server.addresses["ask"], (Answer, Done)) as ask:
        assert [ask.call(Ask(n)) for n in range(100)] == [Answer(n + 1) for n in range(100)]


def test_a_type_of_another_channel_is_refused_and_counted(server: ControlServer) -> None:
    with ControlClient(server.addresses["ask"], Answer) as client:
        with pytest.raises(ProtocolMismatch, match="none of Ask"):
            client.call(CommitRequest("r"))
        assert server.refused == {"alloc": 0, "ask": 1}
        assert client.call(Ask(1)) == Answer(2)


def test_an_answer_of_another_type_names_the_address(server: ControlServer) -> None:
    address = server.addresses["alloc"]
    with (
        ControlClient(address, Answer) as client,
        pytest.raises(ProtocolMismatch, match=f"{address} to CommitRequest"),
    ):
        client.call(CommitRequest("r"))


def test_two_clients_and_their_threads_at_once(server: ControlServer) -> None:
    results: dict[int, list[int]] = {}
    with (
        ControlClient(server.addresses["ask"], Answer) as one,
        ControlClient(server.addresses["ask"], Answer) as two,
    ):

        def work(index: int) -> None:
            client = (one, two)[index % 2]
            results[index] = [client.call(Ask(index * 1000 + n)).number for n in range(50)]

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_GUARD_S)
    assert results == {i: [i * 1000 + n + 1 for n in range(50)] for i in range(4)}


class Private(PeerLost):
    """A subclass that the peer does not know."""


@pytest.mark.parametrize(
    ("raised", "caught", "text"),
    [
        (PeerLost("incarnation d-1 is gone", 7), PeerLost, "incarnation d-1 is gone"),
        (Private("x"), PeerLost, "x"),
        (InvalidUsage("u" * 10_000), InvalidUsage, "u" * 4096 + "$"),
        (NotAvailable("name \udcff"), NotAvailable, r"name \?"),
        (ZeroDivisionError("secret"), errors.KvxferError, "internal error.*ZeroDivisionError"),
    ],
)
def test_what_a_handler_raises_is_raised_at_the_caller(
    raised: Exception, caught: type[Exception], text: str
) -> None:
    def handler(message: Ask) -> Answer:
        if message.number:
            return Answer(0)
        raise raised

    with (
        ControlServer({"ask": {Ask: handler}}) as server,
        ControlClient(server.addresses["ask"], Answer) as client,
    ):
        with pytest.raises(caught, match=text) as info:
            client.call(Ask(0))
        assert type(info.value) is caught
        assert info.value.code == getattr(raised, "code", 0)  # type: ignore[attr-defined]
        assert server.addresses["ask"] in str(info.value)
        assert "secret" not in str(info.value)
        assert client.call(Ask(1)) == Answer(0)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "internal error.*TypeError"),
        (b"bytes", "internal error.*TypeError"),
        (Answer(1 << 65), "Answer cannot be encoded"),
        (Done("x"), "is none of Answer"),
    ],
)
def test_a_handler_that_returns_rubbish_does_not_stop_the_server(result: object, text: str) -> None:
    handlers = {Ask: lambda message: result if message.number else Answer(5)}
    with (
        ControlServer({"ask": handlers}) as server,  # type: ignore[dict-item]
        ControlClient(server.addresses["ask"], Answer) as client,
    ):
        with pytest.raises(errors.KvxferError, match=text):
            client.call(Ask(1))
        assert client.call(Ask(0)) == Answer(5)


def test_an_error_of_an_unknown_class_is_the_base_class() -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def answer() -> None:
        identity, call_id, head, _, _ = router.recv_multipart()
        body = msgspec.msgpack.encode({"type": "error", "kind": "Exception", "message": "new"})
        router.send_multipart([identity, call_id, head, body])

    thread = run_in_thread(answer)
    with ControlClient(f"tcp://127.0.0.1:{port}", Done) as client:
        with pytest.raises(errors.KvxferError, match="Exception: new") as info:
            client.call(CommitRequest("r"), deadline_s=HANG_GUARD_S)
        assert type(info.value) is errors.KvxferError
    thread.join(HANG_GUARD_S)
    context.destroy(linger=0)


def test_a_server_of_another_version_is_named() -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def answer() -> None:
        identity, call_id, _, _, _ = router.recv_multipart()
        router.send_multipart([identity, call_id, b"KVXF\x00\x09", b"", b"future frame"])

    thread = run_in_thread(answer)
    with (
        ControlClient(f"tcp://127.0.0.1:{port}", Done) as client,
        pytest.raises(ProtocolMismatch, match=rf"127.0.0.1:{port}.*version 9, this side 5"),
    ):
        client.call(CommitRequest("r"), deadline_s=HANG_GUARD_S)
    thread.join(HANG_GUARD_S)
    context.destroy(linger=0)


def test_a_late_answer_is_not_taken_for_that_of_the_next_call() -> None:
    gate = threading.Event()

    def handler(message: Ask) -> Answer:
        if message.number == 1:
            gate.wait(HANG_GUARD_S)
        return Answer(message.number)

    with (
        ControlServer({"ask": {Ask: handler}}) as server,
        ControlClient(server.addresses["ask"], Answer, deadline_s=HANG_GUARD_S) as client,
    ):
        assert client.call(Ask(0)) == Answer(0)
        with pytest.raises(ControlTimeout, match=r"Ask to tcp://.* after 0.2 s: sent, not answ"):
            client.call(Ask(1), deadline_s=0.2)
        gate.set()
        assert client.call(Ask(2)) == Answer(2)


def test_deadline_against_a_socket_that_accepts_and_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        with (
            ControlClient(f"tcp://127.0.0.1:{port}", Done, deadline_s=0.2) as client,
            pytest.raises(ControlTimeout, match=f"CommitRequest to tcp://127.0.0.1:{port}.* 0.2 s"),
        ):
            client.call(CommitRequest("r"))


def test_nothing_is_queued_for_a_peer_that_is_not_there() -> None:
    port = free_port()
    seen: list[int] = []

    def handler(message: Ask) -> Answer:
        seen.append(message.number)
        return Answer(message.number)

    with ControlClient(f"tcp://127.0.0.1:{port}", Answer) as client:
        for number in range(3):
            with pytest.raises(ControlTimeout, match="nothing was sent"):
                client.call(Ask(number), deadline_s=0.05)
        with ControlServer({"ask": {Ask: handler}}, ports={"ask": port}):
            assert client.call(Ask(9), deadline_s=HANG_GUARD_S) == Answer(9)
    assert seen == [9]


def test_a_call_survives_a_restart_of_the_server_between_calls() -> None:
    ports = {"ask": free_port()}
    with serve(ports=ports) as first:
        client = ControlClient(first.addresses["ask"], Answer, deadline_s=HANG_GUARD_S)
        assert client.call(Ask(1)) == Answer(2)
    with serve(ports=ports), contextlib.closing(client):
        # The first call may still go out on the connection that is just being torn down.
        for _ in range(100):
            try:
                reply = client.call(Ask(2), deadline_s=0.5)
                break
            except (ControlTimeout, PeerLost):
                continue
        assert reply == Answer(3)


def test_close_in_a_call_and_calls_after_close() -> None:
    started = threading.Event()
    caught: list[BaseException] = []
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = ControlClient(f"tcp://127.0.0.1:{mute.getsockname()[1]}", Done)

        def call() -> None:
            started.set()
            try:
                client.call(CommitRequest("r"), deadline_s=600)
            except InvalidUsage as error:
                caught.append(error)

        thread = run_in_thread(call)
        assert started.wait(HANG_GUARD_S)
        client.close()
        client.close()
        thread.join(HANG_GUARD_S)
    assert len(caught) == 1
    with pytest.raises(InvalidUsage, match="is closed"):
        client.call(CommitRequest("r"))


def test_close_with_a_dead_peer_and_an_unanswered_call_returns() -> None:
    def use() -> None:
        client = ControlClient(f"tcp://127.0.0.1:{free_port()}", Done)
        with pytest.raises(ControlTimeout):
            client.call(CommitRequest("r"), deadline_s=0.05)
        client.close()

    thread = run_in_thread(use)
    thread.join(HANG_GUARD_S)
    assert not thread.is_alive()


def test_server_close_is_idempotent_frees_the_port_and_works_from_a_handler() -> None:
    def stop(message: Ask) -> Answer:
        server.close()
        return Answer(0)

    ports = {"ask": free_port()}
    server = ControlServer({"ask": {Ask: stop}}, ports=ports)
    # Without linger the answer may be lost; what counts is that the server ends.
    with (
        ControlClient(server.addresses["ask"], Answer) as client,
        contextlib.suppress(ControlTimeout, PeerLost),
    ):
        client.call(Ask(0), deadline_s=1.0)
    for _ in range(2):
        server.close()
    serve(ports=ports).close()


def test_server_close_with_a_stuck_handler_returns() -> None:
    gate, entered = threading.Event(), threading.Event()

    def stuck(message: Ask) -> Answer:
        entered.set()
        gate.wait()
        return Answer(0)

    server = ControlServer({"ask": {Ask: stuck}})
    with ControlClient(server.addresses["ask"], Answer) as client:

        def call() -> None:
            with contextlib.suppress(PeerLost, InvalidUsage):  # the server is closed, or the client
                client.call(Ask(0), deadline_s=600)

        caller = run_in_thread(call)
        assert entered.wait(HANG_GUARD_S)
    caller.join(HANG_GUARD_S)
    closer = run_in_thread(server.close)
    closer.join(HANG_GUARD_S)
    closed = not closer.is_alive()
    gate.set()
    closer.join(HANG_GUARD_S)
    assert closed


def test_a_forked_child_cannot_stop_or_use_what_its_parent_serves(server: ControlServer) -> None:
    with ControlClient(server.addresses["ask"], Answer) as client:
        assert client.call(Ask(1)) == Answer(2)
        child = os.fork()
        if child == 0:  # only exit codes: a child of pytest must not run its reporting
            try:
                client.call(Ask(2), deadline_s=1.0)
            except InvalidUsage:
                client.close()
                server.close()
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert client.call(Ask(3)) == Answer(4)


@pytest.mark.parametrize("deadline_s", [0, -1, float("nan"), float("inf"), 3601])
def test_deadlines_out_of_range(server: ControlServer, deadline_s: float) -> None:
    with pytest.raises(InvalidUsage, match="deadline_s is"):
        ControlClient(server.addresses["ask"], Answer, deadline_s=deadline_s)
    with (
        ControlClient(server.addresses["ask"], Answer) as client,
        pytest.raises(InvalidUsage, match="deadline_s is"),
    ):
        client.call(Ask(0), deadline_s=deadline_s)
