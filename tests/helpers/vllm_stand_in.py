"""One side of a hand-over without an engine, as a process that tests may kill.

``TRANSPORT receive``: takes reservations and never answers them; prints its addresses.
``TRANSPORT send ADDRESSES ATTEMPT NUM_UNITS``: sends the first layer of a request, and no more.
"""

import json
import sys

import numpy as np
from vllm_engines import BLOCK_TOKENS, TINY

from kvxfer import KVCache, KVLayout, Receiver, Sender
from kvxfer.session import Deferred, Offer, ReceiveLimits

NUM_BLOCKS = 40


def unit_layout() -> KVLayout:
    """The layout of the engines' caches: a block is one unit."""
    return KVLayout(
        TINY["num_layers"],
        TINY["num_kv_heads"],
        head_dim=TINY["head_dim"] * BLOCK_TOKENS,
        dtype="float32",
        block_size=1,
        order="hnd",  # type: ignore[arg-type]
        kv="head_packed",  # type: ignore[arg-type]
    )


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def receive(cache: KVCache, transport: str) -> None:
    def keep(offer: Offer) -> Deferred:
        say(["asked", offer.request_id])
        return Deferred()

    limits = ReceiveLimits(wait_s=60.0)
    with Receiver(cache, transport=transport, on_reserve=keep, limits=limits) as receiver:
        say(dict(receiver.addresses))
        sys.stdin.read()


def send(cache: KVCache, transport: str, addresses: str, attempt: str, num_units: str) -> None:
    with Sender(cache, transport=transport) as sender:
        units = range(int(num_units))
        handle = sender.begin(attempt, to=json.loads(addresses), tokens=units)
        handle.push(np.arange(len(units)), layers=[0])
        say("pushed")
        sys.stdin.read()


if __name__ == "__main__":
    layout = unit_layout()
    filled = np.ones(NUM_BLOCKS * layout.block_bytes, np.uint8)
    with KVCache(layout, filled) as cache:
        {"receive": receive, "send": send}[sys.argv[2]](cache, sys.argv[1], *sys.argv[3:])
