"""A network that goes silent between two living processes."""

from collections.abc import Iterator
from typing import Any

import pytest
from peer_process import RemotePeer
from relay import Relay
from session_sides import child, here, meet, open_receiver, open_sender, sides
from waiting import eventually

BLOCKS = [3, 1, 7]


@pytest.fixture
def cut_pair() -> Iterator[tuple[RemotePeer, RemotePeer, list[Relay], dict[str, str]]]:
    with sides(child(), here()) as (receiver, sender):
        addresses = open_receiver(receiver, limits={"silent_s": 5.0, "drain_s": 0.5})
        open_sender(sender, limits={"silent_s": 5.0})
        relays = {name: Relay(url) for name, url in addresses.items()}
        try:
            yield (
                receiver,
                sender,
                list(relays.values()),
                {name: relay.url for name, relay in relays.items()},
            )
        finally:
            for relay in relays.values():
                relay.close()


def test_both_sides_of_a_cut_end_and_meet_again_once_it_heals(cut_pair: Any) -> None:
    receiver, sender, relays, to = cut_pair
    meet(sender, (receiver, to))
    sender.call("limit", connect_s=2.0)
    sender.call("send_layers", request_id="r-1", block_ids=BLOCKS, to=to)
    sender.call("layer", request_id="r-1", layer=0)
    eventually(lambda: receiver.call("num_free") == 13, "the request was never granted")
    for relay in relays:
        relay.cut()
    # The heartbeats fail, and neither side waits for the other for ever.
    notice = receiver.call("notice")
    assert not notice["ok"]
    assert notice["request_id"] == "r-1"
    assert notice["quarantined"]
    with pytest.raises(Exception, match=r"tcp://|connection"):
        sender.call("wait", request_id="r-1")
    for relay in relays:
        relay.heal()
    sender.call("limit", connect_s=60.0)
    # The sender says by itself that it has let go of the pages.
    eventually(lambda: receiver.call("num_free") == 16, "the quarantine never ended")
    sender.call("send", request_id="r-2", block_ids=BLOCKS, to=to)
    sender.call("wait", request_id="r-2")
    assert receiver.call("notice")["ok"]


def test_a_cut_before_the_first_meeting_is_a_time_out(cut_pair: Any) -> None:
    receiver, sender, relays, to = cut_pair
    for relay in relays:
        relay.cut()
    sender.call("limit", connect_s=2.0)
    sender.call("send", request_id="r-1", block_ids=BLOCKS, to=to)
    with pytest.raises(Exception, match=r"InitRequest to tcp://\S+ is not done"):
        sender.call("wait", request_id="r-1")
    assert receiver.call("num_open") == 0
