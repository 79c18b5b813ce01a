"""What became of a request, once it is said."""

import pytest

from kvxfer.errors import TransferFailed
from kvxfer.layout import KVLayout, TPLayout
from kvxfer.layout.shares import KVShard
from kvxfer.session.parts import Parts
from kvxfer.session.shipment import Shipment


def shipment(num_ranks: int) -> Shipment:
    shard = KVShard(KVLayout(2, 2, head_dim=8, block_size=4), TPLayout())
    parts = Parts("r", shard, range(4))
    return Shipment("r", parts, num_ranks=num_ranks, tuning=None, tell=lambda: None)


def test_what_has_ended_well_stays_so() -> None:
    made = shipment(2)
    for num_bytes in (3, 4):
        made.end_rank(num_bytes, None)
    assert made.poll(0.0)
    made.end_all(TransferFailed("the sender failed"))
    assert made.poll(0.0)
    assert (made.num_bytes, made.given_up) == (7, "")


def test_what_has_not_ended_ends_with_all_ranks() -> None:
    made = shipment(3)
    made.end_rank(3, None)
    made.end_all(TransferFailed("the sender failed"))
    with pytest.raises(TransferFailed, match="the sender failed"):
        made.poll(0.0)
