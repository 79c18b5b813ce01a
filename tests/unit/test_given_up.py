"""A copy that its link has given up and cannot end: its request is no end before the copy is."""

import threading

import numpy as np
import pytest

from kvxfer import KVCache, KVLayout, Receiver, Sender
from kvxfer.errors import TransferFailed, TransferTimeout
from kvxfer.session import ReceiveLimits
from kvxfer.transport import Transfer
from kvxfer.transport.host_copy import HostLink

LAYOUT = KVLayout(1, 1, head_dim=8, dtype="float32", block_size=4)
DRAIN_S, GUARD_S = 1.0, 60.0


class GivenUp(Transfer):
    """Moves until the test says otherwise."""

    num_bytes = sequence = 0
    actual_path = "test"

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.link: HostLink | None = None

    def poll(self, timeout_s: float) -> bool:
        if not self.ended.wait(timeout_s):
            return False
        assert self.link is not None
        self.link.given_up = None
        raise TransferFailed("it was given up")


@pytest.mark.parametrize("ends_in_time", [True, False])
def test_a_request_is_aborted_once_what_was_given_up_has_ended(
    monkeypatch: pytest.MonkeyPatch, ends_in_time: bool
) -> None:
    moving = GivenUp()

    def give_up(self: HostLink, *args: object, **options: object) -> Transfer:
        self.given_up, moving.link = moving, self
        raise TransferTimeout("it stands still")

    monkeypatch.setattr(HostLink, "post", give_up)
    memory = [np.zeros(4 * LAYOUT.block_bytes, np.uint8) for _ in range(2)]
    limit_s = GUARD_S if ends_in_time else DRAIN_S
    limits = ReceiveLimits(receive_s=limit_s, drain_s=limit_s)
    with (
        KVCache(LAYOUT, memory[0]) as target,
        KVCache(LAYOUT, memory[1]) as source,
        Receiver(target, transport="loopback", limits=limits) as receiver,
        Sender(source, transport="loopback") as sender,
    ):
        handle = sender.send("r", [1, 2], to=receiver.addresses)
        if ends_in_time:
            assert receiver.poll(DRAIN_S / 2) is None
            moving.ended.set()
        notice = receiver.poll(20.0)
        assert notice is not None
        assert not notice.ok
        assert notice.quarantined is not ends_in_time
        moving.ended.set()
        with pytest.raises(TransferTimeout if ends_in_time else TransferFailed):
            handle.wait(20.0)
