"""A sender that dies over a network: its process cannot be asked for, its connection can."""

import pytest
from peer_process import ChildProcess
from session_sides import child, here, open_receiver, open_sender, sides
from transport_pairs import NIXL, UCX, Kind, require_available
from waiting import eventually


@pytest.mark.parametrize("kind", [UCX, NIXL], ids=lambda kind: kind.transport)
def test_blocks_of_a_killed_sender_are_free_again(kind: Kind) -> None:
    require_available(kind)
    with sides(here(), child()) as (receiver, sender):
        assert isinstance(sender, ChildProcess)
        to = open_receiver(receiver, transport=kind.transport)
        open_sender(sender, transport=kind.transport)
        sender.call("send_layers", request_id="r-1", block_ids=[3, 1, 7], to=to)
        sender.call("layer", request_id="r-1", layer=0)
        before = receiver.call("content")
        eventually(lambda: (receiver.call("content") != before).any(), "no byte has come")
        sender.kill()
        assert not receiver.call("notice")["ok"]
        eventually(lambda: receiver.call("num_free") == 16, "the blocks stay held")
