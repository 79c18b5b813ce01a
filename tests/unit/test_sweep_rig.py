"""The end of a rig: what failed first is what is told."""

from typing import Any

import msgspec
import pytest

from kvxfer.errors import ControlTimeout, KvxferError, PeerLost
from kvxfer.sweep import messages
from kvxfer.sweep.agent import Agent
from kvxfer.sweep.cases import raw_layout
from kvxfer.sweep.rig import Rig, RigSpec
from kvxfer.transport import Op

SPEC = RigSpec(
    layout=raw_layout(4096, 2),
    num_blocks=4,
    transport="loopback",
    memory="private",
    op=Op.PUT,
    num_threads=1,
    copy_threads=1,
    devices=(-1, -1),
)


@pytest.mark.parametrize("at_release", [PeerLost("gone too"), ControlTimeout("not done")])
def test_a_clean_up_that_fails_is_not_told_in_place_of_what_came_before(
    monkeypatch: pytest.MonkeyPatch, at_release: KvxferError
) -> None:
    agent = Agent()
    handle = agent.call

    def call(message: msgspec.Struct) -> Any:
        if isinstance(message, messages.Fill):
            raise PeerLost("the far side has ended")
        if isinstance(message, messages.Release):
            raise at_release
        return handle(message)

    monkeypatch.setattr(agent, "call", call)
    with (
        pytest.raises(PeerLost, match="the far side has ended"),
        Rig(SPEC, agent) as rig,
    ):
        rig.fill_destination(1)
    agent.close()
