"""Agents of NIXL that talk to a server of the `nixl` transport as no link of ours does."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from transport_pairs import Pair
from waiting import eventually

from kvxfer.control import ControlClient, InitReply, InitRequest
from kvxfer.session.layouts import layout_spec, rank_spec
from kvxfer.transport.nixl import wire
from kvxfer.transport.nixl.agent import Agent
from kvxfer.transport.nixl.wire import Message

_MORE_S = 0.5


def region_of(pair: Pair) -> tuple[Any, InitReply]:
    request = InitRequest(
        incarnation=pair.local.endpoint.incarnation,
        layout=layout_spec(pair.local.cache.shard.model),
        rank=rank_spec(pair.local.cache.shard.rank),
        transports=["nixl"],
    )
    with ControlClient(pair.remote_opened["addresses"]["init"], InitReply) as client:
        reply = client.call(request)
    sealed = msgspec.msgpack.decode(reply.regions[0])
    return msgspec.msgpack.decode(sealed["region"]), reply


@contextmanager
def stranger(region: Any) -> Iterator[Agent]:
    agent = Agent("UCX", {"engine_config": "NET_DEVICES=lo"})
    try:
        agent.know(region["agent"], region["metadata"])
        yield agent
    finally:
        agent.close()


def hello(agent: Agent, region: Any, **fields: Any) -> bytes:
    body = {
        "version": wire.VERSION,
        "secret": region["secret"],
        "slot": 63,
        "process": region["process"],
        "host": "elsewhere",
        "in_device": False,
        "metadata": agent.metadata(),
    }
    return msgspec.msgpack.encode(body | fields)


def answers(agent: Agent, key: bytes, number: int = 0) -> list[Message]:
    """So many answers, and what else comes for a while."""
    box = agent.open_box(key)
    found: list[Message] = []

    def listen() -> bool:
        agent.pump()
        while (mail := box.take()) is not None:
            found.append(mail[1])
        return len(found) >= number

    eventually(listen, f"{number} answers")
    end = time.monotonic() + _MORE_S
    while time.monotonic() < end:
        listen()
    return found
