"""The ports of a worker's ranks: derived or listed, distinct, free, and aliases of one channel."""

import socket
from collections.abc import Callable

import pytest
from free_ports import free_port, free_ports

from kvxfer.control import CommitRequest, ControlClient, ControlServer, Done, Ports
from kvxfer.errors import InvalidUsage, NotAvailable

HANDLERS = {CommitRequest: lambda message: Done(message.request_id)}


def test_derived_ports_are_two_a_rank_in_a_row() -> None:
    ports = Ports.derived(4001, 3)
    assert ports == Ports((4001, 4003, 4005), (4002, 4004, 4006))
    assert ports.for_rank(1) == {"init": 4003, "alloc": 4004}
    assert ports.for_scheduler() == {"alloc": (4002, 4004, 4006)}
    assert sorted(port for *_, port in ports) == list(range(4001, 4007))
    assert Ports.derived(65534, 1).alloc == (65535,)


def test_listed_ports_of_more_ranks_than_are_used() -> None:
    assert Ports.listed([1, 3, 5], [2, 4, 6], 2) == Ports((1, 3), (2, 4))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Ports.derived(65535, 1), "need ports 65535 to 65536"),
        (lambda: Ports.derived(65000, 300), "65000 and 300 ranks need ports 65000 to 65599"),
        (lambda: Ports.derived(0, 1), "base port 0"),
        (lambda: Ports.derived(4001, 0), "num_ranks is 0"),
        (lambda: Ports.derived(4001, True), "num_ranks is True"),
        (lambda: Ports.listed([1, 3], [2], 2), r"1 alloc ports \[2\] for 2 ranks"),
        (lambda: Ports.listed([1], [2, 4], 2), r"1 init ports \[1\] for 2 ranks"),
        (lambda: Ports((1, 2), (3,)), "give one of each for every rank"),
        (lambda: Ports((), ()), "give one of each"),
        (lambda: Ports((1, 1), (2, 3)), "init of rank 0 and init of rank 1 both have port 1"),
        (lambda: Ports((1, 2), (3, 2)), "init of rank 1 and alloc of rank 1 both have port 2"),
        (lambda: Ports((0,), (2,)), "port 0 of init of rank 0 is out of range"),
        (lambda: Ports((1,), (70000,)), "port 70000 of alloc of rank 0"),
        (lambda: Ports.derived(4001, 2).for_rank(2), "rank 2 has no ports; there are 2"),
        (lambda: Ports.derived(4001, 2).for_rank(-1), "rank -1 has no ports"),
    ],
)
def test_ports_that_cannot_be(make: Callable[[], object], text: str) -> None:
    with pytest.raises(InvalidUsage, match=text):
        make()


def test_busy_ports_are_found_at_the_start_and_all_are_named() -> None:
    numbers = free_ports(4)
    ports = Ports(tuple(numbers[:2]), tuple(numbers[2:]))
    ports.require_free()
    with (
        socket.create_server(("127.0.0.1", numbers[1])),
        socket.create_server(("127.0.0.1", numbers[2])),
        pytest.raises(NotAvailable, match="2 of 4 ports cannot be bound") as info,
    ):
        ports.require_free()
    assert f"port {numbers[1]} (init of rank 1" in str(info.value)
    assert f"port {numbers[2]} (alloc of rank 0" in str(info.value)
    ports.require_free()


def test_one_alloc_channel_answers_on_the_ports_of_all_ranks() -> None:
    numbers = free_ports(6)
    ports = Ports(tuple(numbers[:3]), tuple(numbers[3:]))
    ports.require_free()
    seen: list[str] = []

    def commit(message: CommitRequest) -> Done:
        seen.append(message.request_id)
        return Done(message.request_id)

    with ControlServer({"alloc": {CommitRequest: commit}}, ports=ports.for_scheduler()) as server:
        urls = tuple(f"tcp://127.0.0.1:{port}" for port in ports.alloc)
        assert server.aliases == {"alloc": urls}
        assert server.addresses == {"alloc": urls[0]}
        for url in urls:
            with ControlClient(url, Done) as client:
                assert client.call(CommitRequest(url)) == Done(url)
        assert seen == list(urls)
        # The ranks' own servers find their init ports free, and an alloc port taken.
        ControlServer({"init": HANDLERS}, ports={"init": ports.init[2]}).close()
        with pytest.raises(
            NotAvailable, match=f"port {ports.alloc[2]} for channel alloc is in use"
        ):
            ControlServer({"alloc": HANDLERS}, ports={"alloc": ports.alloc[2]})


def test_free_aliases_and_a_busy_one() -> None:
    with ControlServer({"alloc": HANDLERS}, ports={"alloc": (0, 0)}) as server:
        assert len(set(server.aliases["alloc"])) == 2
        taken = int(server.aliases["alloc"][1].rpartition(":")[2])
        free = free_port()
        with pytest.raises(NotAvailable, match=f"port {taken} .*in use"):
            ControlServer({"alloc": HANDLERS}, ports={"alloc": (free, taken)})
        ControlServer({"alloc": HANDLERS}, ports={"alloc": free}).close()


@pytest.mark.parametrize(
    ("ports", "text"),
    [
        ({"alloc": ()}, "'alloc' has no port"),
        ({"alloc": (4001, 4001)}, "'alloc' and 'alloc' both have port 4001"),
        ({"alloc": (0, 70000)}, "70000 of channel 'alloc'"),
        ({"alloc": "4001"}, "'4' of channel 'alloc'"),
    ],
)
def test_aliases_that_cannot_be(ports: dict[str, tuple[int, ...]], text: str) -> None:
    with pytest.raises(InvalidUsage, match=text):
        ControlServer({"alloc": HANDLERS}, ports=ports)
