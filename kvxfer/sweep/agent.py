"""One rank of a sweep: prepares a pool, serves it, fills and checks it.

``Agent`` does the work. The sweep talks to one in its own process (loopback) or, through
:class:`RemoteAgent`, to one in another; both look the same.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

import msgspec
import numpy as np

from kvxfer.control import ControlClient, ControlServer, SharedKey
from kvxfer.errors import InvalidUsage
from kvxfer.session import Endpoint
from kvxfer.session.layouts import shard_of
from kvxfer.sweep import messages
from kvxfer.sweep.binding import LOOPBACK, Binding
from kvxfer.sweep.compute import ComputeLoad
from kvxfer.sweep.host_memory import require_host_memory
from kvxfer.sweep.patterned_cache import PatternedCache
from kvxfer.sweep.peers.library import FarSide
from kvxfer.sweep.peers.registry import row_of
from kvxfer.sweep.token_runs import Ids, TokenRuns
from kvxfer.transport import tuned
from kvxfer.tuning import Profile

Handlers = Mapping[type[msgspec.Struct], Callable[[Any], msgspec.Struct]]

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

    def __init__(self, binding: Binding = LOOPBACK) -> None:
        """Hold nothing yet; what is prepared is served by ``binding``."""
        self._binding = binding
        self._pool: PatternedCache | None = None
        self._endpoint: Endpoint | None = None
        self._load: ComputeLoad | None = None
        self._peer: FarSide | None = None
        self._device = -1
        self._num_threads = 1
        self._tuning: Profile | None = None
        self.handlers: Handlers = {
            messages.Prepare: self._prepare,
            messages.Fill: self._fill,
            messages.FillRanges: self._fill_ranges,
            messages.Check: self._check,
            messages.CheckOutside: self._check_outside,
            messages.CheckRanges: self._check_ranges,
            messages.Compute: self._compute,
            messages.OpenPeer: self._open_peer,
            messages.Release: self._release,
        }

    def call(self, message: msgspec.Struct) -> Any:
        """Handle one message here and now."""
        return self.handlers[type(message)](message)

    def close(self) -> None:
        """Free everything; may be called more than once."""
        held = (self._pool, self._endpoint, self._load, self._peer)
        self._pool = self._endpoint = self._load = self._peer = None
        with ExitStack() as stack:  # the last first, and all of them, whichever fails
            for one in held:
                if one is not None:
                    stack.callback(one.close)

    def _prepare(self, message: messages.Prepare) -> messages.Prepared:
        self.close()
        self._device = message.device
        self._num_threads = message.num_threads
        shard = shard_of(message.layout, message.rank)
        if message.device < 0:
            require_host_memory(message.num_blocks * shard.layout.block_bytes)
        self._pool = PatternedCache(
            shard.model,
            message.num_blocks,
            memory=message.memory,
            device=message.device,
            num_threads=message.num_threads,
            rank=shard.rank,
        )
        self._tuning = message.tuning
        with tuned.using(message.tuning):
            self._endpoint = Endpoint(
                self._pool.cache,
                transport=message.transport,
                num_threads=message.copy_threads,
                bind_host=self._binding.bind_host,
                advertise_host=self._binding.advertise_host,
                key=self._binding.key,
                insecure=self._binding.insecure,
            )
        return messages.Prepared(addresses=self._endpoint.addresses)

    def _prepared(self) -> tuple[PatternedCache, Endpoint]:
        if self._pool is None or self._endpoint is None:
            raise InvalidUsage("nothing is prepared; send Prepare first")
        return self._pool, self._endpoint

    def _fill(self, message: messages.Fill) -> messages.Ready:
        pool, _ = self._prepared()
        pool.fill(message.seed, as_ids(message.block_ids) if message.block_ids else None)
        return messages.Ready()

    def _fill_ranges(self, message: messages.FillRanges) -> messages.Ready:
        pool, _ = self._prepared()
        pool.fill_ranges(message.seed, message.ranges)
        return messages.Ready()

    def _check(self, message: messages.Check) -> messages.Checked:
        pool, _ = self._prepared()
        runs = TokenRuns.request(
            as_ids(message.block_ids),
            as_ids(message.source_ids),
            block_size=pool.cache.layout.block_size,
            source_block_size=message.source_block_size,
            count=message.num_tokens,
        )
        return pool.check(message.seed, runs, converted_from=message.converted_from)

    def _check_outside(self, message: messages.CheckOutside) -> messages.Checked:
        pool, _ = self._prepared()
        runs = TokenRuns.outside_request(
            as_ids(message.block_ids),
            block_size=pool.cache.layout.block_size,
            num_blocks=pool.cache.num_blocks,
            count=message.num_tokens,
        )
        return pool.check(message.seed, runs)

    def _check_ranges(self, message: messages.CheckRanges) -> messages.Checked:
        pool, _ = self._prepared()
        return pool.check_ranges(message.seed, message.ranges)

    def _compute(self, message: messages.Compute) -> messages.Computed:
        if message.running:
            self._load = ComputeLoad(message.kind, self._device)
            return messages.Computed(operation_us=0.0)
        load, self._load = self._load, None
        if load is None:
            raise InvalidUsage("no compute load is running")
        return messages.Computed(operation_us=load.close())

    def _open_peer(self, message: messages.OpenPeer) -> messages.OpenedPeer:
        pool, _ = self._prepared()
        library, row = row_of(message.row)
        self._peer = library.serve(pool, row)
        return messages.OpenedPeer(
            address=pool.start_address, device=pool.cache.device, contact=self._peer.contact
        )

    def _release(self, _: messages.Release) -> messages.Ready:
        self.close()
        return messages.Ready()


def as_ids(block_ids: list[int]) -> Ids:
    """Block ids of a message, int64."""
    return np.array(block_ids, dtype=np.int64)


class RemoteAgent:
    """An agent in another process, by the address of its sweep channel."""

    def __init__(self, address: str, *, key: SharedKey | None = None) -> None:
        self._client = ControlClient(address, messages.REPLIES, deadline_s=CALL_DEADLINE_S, key=key)

    def call(self, message: msgspec.Struct, *, deadline_s: float | None = None) -> Any:
        """Send the message and wait for the reply.

        Raises:
            ControlTimeout: the process did not answer in time.
            KvxferError: what the far side raised.
        """
        return self._client.call(message, deadline_s=deadline_s)

    def close(self) -> None:
        """End the connection."""
        self._client.close()


def serve_agent(
    handlers: Handlers,
    *,
    port: int = 0,
    binding: Binding = LOOPBACK,
    on_gone: Callable[[str, str], object] | None = None,
) -> ControlServer:
    """Serve an agent's messages on a channel called ``sweep``; see `ControlServer`."""
    return ControlServer(
        {"sweep": handlers},
        ports={"sweep": port},
        bind_host=binding.bind_host,
        advertise_host=binding.advertise_host,
        key=binding.key,
        insecure=binding.insecure,
        on_gone=on_gone,
    )
