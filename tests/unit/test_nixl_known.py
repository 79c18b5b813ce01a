"""What an agent of `nixl` knows of others, where what they say contradicts; a stand-in for NIXL."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.errors import ProtocolMismatch
from kvxfer.transport.nixl import agent as module
from kvxfer.transport.nixl.agent import Agent


class StandIn:
    """Takes ``name:address=registration``; like NIXL it refuses another one at an address."""

    def __init__(self, *_: Any) -> None:
        self.known: dict[str, dict[str, str]] = {}
        self.num_removed = 0

    def get_plugin_list(self) -> list[str]:
        return ["UCX"]

    def create_backend(self, *_: Any) -> None:
        """There is nothing to it."""

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name, _, memory = metadata.decode().partition(":")
        address, _, registration = memory.partition("=")
        if not registration or self.known.get(name, {}).get(address, registration) != registration:
            raise RuntimeError("NIXL_ERR_NOT_ALLOWED")
        self.known.setdefault(name, {})[address] = registration
        return name.encode()

    def remove_remote_agent(self, name: str) -> None:
        del self.known[name]
        self.num_removed += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Agent, StandIn]:
    api = SimpleNamespace(nixl_agent=StandIn, nixl_agent_config=lambda **_: None)
    monkeypatch.setattr(module, "load_api", lambda: api)
    agent = Agent("UCX", {})
    agent.know("peer", b"peer:pages=1")
    agent.know("peer", b"peer:slots=1")
    return agent, agent._agent


def test_what_a_peer_registers_anew_takes_the_place(made: tuple[Agent, StandIn]) -> None:
    agent, nixl = made
    with agent.linked("peer"):
        agent.know("peer", b"peer:slots=2")
        assert nixl.known == {"peer": {"pages": "1", "slots": "2"}}
        agent.know("peer", b"peer:slots=2")
        agent.know("peer", b"peer:pages=1")
        assert nixl.num_removed == 1
        agent.know("peer", b"peer:slots=1")  # what was dropped is not taken for known
        assert nixl.known == {"peer": {"pages": "1", "slots": "1"}}


def test_with_several_links_nothing_is_dropped(made: tuple[Agent, StandIn]) -> None:
    agent, nixl = made
    with agent.linked("peer"):
        with agent.linked("peer"), pytest.raises(ProtocolMismatch, match="NOT_ALLOWED"):
            agent.know("peer", b"peer:slots=2")
        assert nixl.known["peer"]["slots"] == "1"
        agent.know("peer", b"peer:slots=2")
    assert not agent._num_links


def test_what_may_not_replace_is_refused(made: tuple[Agent, StandIn]) -> None:
    agent, nixl = made
    with pytest.raises(ProtocolMismatch, match="NOT_ALLOWED"):
        agent.know("peer", b"peer:slots=2", may_replace=False)
    assert nixl.num_removed == 0


@pytest.mark.parametrize("metadata", [b"nonsense", b"", b"\xff"])
def test_nonsense_leaves_what_is_known(made: tuple[Agent, StandIn], metadata: bytes) -> None:
    agent, nixl = made
    with agent.linked("peer"), pytest.raises(ProtocolMismatch):
        agent.know("peer", metadata)
    assert nixl.known == {"peer": {"pages": "1", "slots": "1"}}
    agent.know("peer", b"peer:slots=1")
    agent.forget("peer")
    assert nixl.known == {}


def test_metadata_of_another_agent_leaves_what_is_known(made: tuple[Agent, StandIn]) -> None:
    agent, nixl = made
    agent.know("other", b"other:slots=1")
    with agent.linked("peer"), pytest.raises(ProtocolMismatch):
        agent.know("peer", b"other:slots=2")
    assert nixl.known == {"peer": {"pages": "1", "slots": "1"}, "other": {"slots": "1"}}
