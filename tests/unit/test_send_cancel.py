"""A request that is cancelled while a copy of it runs: what was read then counts for nothing."""

import numpy as np
import pytest

from kvxfer import KVCache, KVLayout, Receiver, Sender
from kvxfer.errors import TransferFailed
from kvxfer.session import SendHandle
from kvxfer.transport.host_copy import HostLink

LAYOUT = KVLayout(1, 1, head_dim=8, dtype="float32", block_size=4)


def test_a_request_whose_blocks_may_have_been_used_again_is_not_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handles: list[SendHandle] = []
    post = HostLink.post

    def post_and_cancel(self: HostLink, *args: object, **options: object) -> object:
        transfer = post(self, *args, **options)  # type: ignore[arg-type]
        handles[0].cancel()
        return transfer

    monkeypatch.setattr(HostLink, "post", post_and_cancel)
    memory = [np.zeros(4 * LAYOUT.block_bytes, np.uint8) for _ in range(2)]
    with (
        KVCache(LAYOUT, memory[0]) as target,
        KVCache(LAYOUT, memory[1]) as source,
        Receiver(target, transport="loopback") as receiver,
        Sender(source, transport="loopback") as sender,
    ):
        handles.append(sender.begin("r", to=[receiver.addresses], tokens=range(8)))
        handles[0].push([1, 2])
        handles[0].finish()
        with pytest.raises(TransferFailed):
            handles[0].wait(20.0)
        notice = receiver.poll(20.0)
        assert notice is not None
        assert not notice.ok
