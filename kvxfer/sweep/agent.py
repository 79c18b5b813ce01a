"""The far side of a sweep: prepares a pool, serves it, fills and checks it.

``Agent`` does the work. The sweep talks to one in its own process (loopback) or, through
:class:`RemoteAgent`, to one in a process of its own; both look the same.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

import msgspec
import numpy as np

from kvxfer import _core
from kvxfer.control import ControlClient, ControlServer
from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVLayout
from kvxfer.session import Endpoint
from kvxfer.sweep import messages
from kvxfer.sweep.compute import ComputeLoad
from kvxfer.sweep.patterned_cache import PatternedCache

# Preparing or checking gigabytes takes seconds, longer while memory is touched for the first time.
CALL_DEADLINE_S = 120.0


class SweepAgent(Protocol):
    """Takes a message of :mod:`kvxfer.sweep.messages`, gives the reply."""

    def call(self, message: msgspec.Struct) -> Any:
        """Do what the message says."""

    def close(self) -> None:
        """Free everything; may be called more than once."""


class Agent:
    """An agent in this process."""

    def __init__(self) -> None:
        self._pool: PatternedCache | None = None
        self._endpoint: Endpoint | None = None
        self._load: ComputeLoad | None = None
        self._device = -1
        self.handlers: Mapping[type[msgspec.Struct], Callable[[Any], msgspec.Struct]] = {
            messages.Prepare: self._prepare,
            messages.Fill: self._fill,
            messages.FillPrefix: self._fill_prefix,
            messages.Check: self._check,
            messages.CheckPrefix: self._check_prefix,
            messages.Compute: self._compute,
            messages.Release: self._release,
        }

    def call(self, message: msgspec.Struct) -> Any:
        """Handle one message here and now."""
        return self.handlers[type(message)](message)

    def close(self) -> None:
        """Free everything; may be called more than once."""
        held = (self._pool, self._endpoint, self._load)
        self._pool = self._endpoint = self._load = None
        with ExitStack() as stack:  # the last first, and all of them, whichever fails
            for one in held:
                if one is not None:
                    stack.callback(one.close)

    def _prepare(self, message: messages.Prepare) -> messages.Prepared:
        self.close()
        self._device = message.device
        self._pool = PatternedCache(
            KVLayout(**msgspec.structs.asdict(message.layout)),
            message.num_blocks,
            memory=message.memory,
            device=message.device,
            num_threads=message.num_threads,
        )
        self._endpoint = Endpoint(self._pool.cache, transport=message.transport)
        return messages.Prepared(addresses=self._endpoint.addresses)

    def _prepared(self) -> PatternedCache:
        if self._pool is None:
            raise InvalidUsage("nothing is prepared; send Prepare first")
        return self._pool

    def _fill(self, message: messages.Fill) -> messages.Ready:
        ids = np.array(message.block_ids, dtype=np.int64) if message.block_ids else None
        self._prepared().fill(message.seed, ids)
        return messages.Ready()

    def _fill_prefix(self, message: messages.FillPrefix) -> messages.Ready:
        self._prepared().fill_prefix(message.seed, message.num_bytes)
        return messages.Ready()

    def _check(self, message: messages.Check) -> messages.Checked:
        found = self._prepared().check(
            message.seed,
            np.array(message.block_ids, dtype=np.int64),
            np.array(message.source_ids, dtype=np.int64),
        )
        return _checked(found)

    def _check_prefix(self, message: messages.CheckPrefix) -> messages.Checked:
        found = self._prepared().check_prefix(message.seed, message.num_bytes)
        return _checked(found)

    def _compute(self, message: messages.Compute) -> messages.Computed:
        if message.running:
            self._load = ComputeLoad(message.kind, self._device)
            return messages.Computed(operation_us=0.0)
        load, self._load = self._load, None
        if load is None:
            raise InvalidUsage("no compute load is running")
        return messages.Computed(operation_us=load.close())

    def _release(self, _: messages.Release) -> messages.Ready:
        self.close()
        return messages.Ready()


def _checked(found: _core.PatternMismatch) -> messages.Checked:
    wrong = found.num_wrong_words
    return messages.Checked(num_wrong_words=wrong, first_page=found.first_page if wrong else 0)


class RemoteAgent:
    """An agent in another process, by the address of its sweep channel."""

    def __init__(self, address: str) -> None:
        self._client = ControlClient(address, messages.REPLIES, deadline_s=CALL_DEADLINE_S)

    def call(self, message: msgspec.Struct) -> Any:
        """Send the message and wait for the reply.

        Raises:
            ControlTimeout: the process did not answer in time.
            KvxferError: what the far side raised.
        """
        return self._client.call(message)

    def close(self) -> None:
        """End the connection."""
        self._client.close()


def serve_agent(agent: Agent) -> ControlServer:
    """Serve an agent's messages on a channel called ``sweep``."""
    return ControlServer({"sweep": agent.handlers})
