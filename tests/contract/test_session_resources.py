"""Senders that come and go leave nothing behind, here or at the receiver."""

from leaks import check_flat, resources
from session_sides import child, here, open_receiver, open_sender, ports_of, sides

from kvxfer.session import Sender


def test_senders_that_come_and_go_leave_nothing() -> None:
    with sides(child(), here()) as (receiver, near):
        to = open_receiver(receiver)
        open_sender(near)
        cache = near.host.cache  # type: ignore[attr-defined]
        names = iter(range(1000))

        def cycle() -> None:
            name = f"r-{next(names)}"
            with Sender(cache, transport="shm", num_threads=2) as sender:
                sender.send(name, [1, 2], to=to).wait(20.0)
            assert receiver.call("notice")["ok"]
            receiver.call("release", request_id=name)

        def both() -> dict[str, int]:
            far = receiver.call("resources")
            return resources() | {f"far {name}": value for name, value in far.items()}

        check_flat(both, cycle, num_cycles=50)


def test_receivers_that_come_and_go_leave_nothing_at_their_sender() -> None:
    with sides(child(), here()) as (receiver, sender):
        ports = ports_of(open_receiver(receiver))
        receiver.call("close")
        open_sender(sender)
        names = iter(range(1000))

        def cycle() -> None:
            name = f"r-{next(names)}"
            to = open_receiver(receiver, ports=ports)
            sender.call("send", request_id=name, block_ids=[1, 2], to=to)
            sender.call("wait", request_id=name)
            sender.host.handles.clear()  # type: ignore[attr-defined]
            assert receiver.call("notice")["ok"]
            receiver.call("close")

        def both() -> dict[str, int]:
            far = receiver.call("resources")
            return resources() | {f"far {name}": value for name, value in far.items()}

        check_flat(both, cycle, num_cycles=20)
