"""LMCache engines with kvxfer beside engines without: who carries the pages; all arrive."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

if importlib.util.find_spec("lmcache") is None or importlib.util.find_spec("nixl") is None:
    pytest.skip("LMCache and NIXL are not both installed", allow_module_level=True)

from lmcache_pairs import MODES, NUM_PAGES, Hosts, Pair

TOKENS, CHUNKS = 1000, 4
STOCK: dict[str, Any] = {"installs": False, "channel": "nixl"}
LIMIT = {"kvxfer.connect_timeout_s": 15.0}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    made = Hosts(2)
    yield made
    made.close()


@pytest.fixture(params=MODES)
def pair(request: pytest.FixtureRequest, hosts: Hosts) -> Iterator[Pair]:
    made = Pair(hosts, request.param, extra=LIMIT)
    yield made
    made.close()


def hand_over(pair: Pair, receiver: Any, sender: Any, number: int) -> dict[str, int]:
    first = number * TOKENS
    spec = pair.spec(f"r{number}")
    outcome = sender.call("store", first=first, count=TOKENS, spec=spec, seed=number)
    assert outcome == "ok"
    assert pair.proxy.hear() == f"r{number}"
    found: dict[str, int] = receiver.call("retrieve", first=first, count=TOKENS, seed=number)
    return found


ALL_OF_IT = {"tokens": TOKENS, "wrong": 0, "bytes": TOKENS * 8192}


def test_a_stock_receiver_is_served_by_lmcaches_own_channel(pair: Pair) -> None:
    receiver, sender = pair.receiver(**STOCK), pair.sender()
    assert (receiver.channel, sender.channel) == ("NixlChannel", "KvxferChannel")
    for number in range(3):
        assert hand_over(pair, receiver, sender, number) == ALL_OF_IT
    assert sender.call("moved_bytes") == 0
    assert receiver.call("free_pages", wanted=NUM_PAGES) == NUM_PAGES


def test_a_stock_sender_is_served_by_lmcaches_own_channel(pair: Pair) -> None:
    receiver, sender = pair.receiver(), pair.sender(**STOCK)
    assert (receiver.channel, sender.channel) == ("KvxferChannel", "NixlChannel")
    for number in range(3):
        assert hand_over(pair, receiver, sender, number) == ALL_OF_IT
    assert receiver.call("free_pages", wanted=NUM_PAGES) == NUM_PAGES


def test_upgraded_engines_keep_their_configuration(pair: Pair) -> None:
    upgrade: dict[str, Any] = {"channel": "nixl", "upgrade": True}
    receiver, sender = pair.receiver(**upgrade), pair.sender(**upgrade)
    assert receiver.channel == sender.channel == "KvxferChannel"
    assert hand_over(pair, receiver, sender, 0) == ALL_OF_IT
    assert sender.call("moved_bytes") == TOKENS * 8192
    assert sender.call("shut") >= 0
    assert receiver.call("shut") >= 0


def test_a_bare_install_leaves_nixl_as_it_was(pair: Pair) -> None:
    assert pair.receiver(channel="nixl").channel == "NixlChannel"
