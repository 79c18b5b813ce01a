"""What both of LMCache's PD back ends get: a setting for their channel, and checks of requests."""

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any

from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.token_database import ChunkedTokenDatabase

from kvxfer.connectors.lmcache.agreement import facts_of
from kvxfer.connectors.lmcache.alloc_port import AllocPort
from kvxfer.connectors.lmcache.allocation import AllocCaller
from kvxfer.connectors.lmcache.arrivals import Arrivals
from kvxfer.connectors.lmcache.options import Options, read_options
from kvxfer.connectors.lmcache.outgoing import InFlight, has_failed
from kvxfer.connectors.lmcache.setting import Setting, constructing
from kvxfer.connectors.lmcache.shelf import BackendShelf
from kvxfer.connectors.lmcache.wire import (
    AllocRequest,
    AllocResponse,
    Asker,
    CancelNotif,
    Facts,
    decode,
    encode,
)
from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.transport import After

NOTICE_LINGER_MS = 500  # for the last notices to the proxy
_MAX_WAIT_S = 86400.0
_GRACE_S = 5.0  # a receiver that has no pages says so before a sender has waited too long
_log = logging.getLogger(__name__)


class PDParts:
    """The parts that this package adds to a PD back end; one a back end.

    Attributes:
        options: the settings.
        shelf: the receiver's pages and hits.
        arrivals: what is on its way to them.
        in_flight: a sender's batches.
        caller: asks receivers for pages.
    """

    def __init__(self, backend: Any, config: Any, metadata: Any) -> None:
        """Of ``backend``, which is under construction.

        Raises:
            InvalidUsage: wrong settings.
        """
        self.options: Options = read_options(config.extra_config)
        self._backend, self._config, self._metadata = backend, config, metadata
        self._facts: Facts | None = None
        self.shelf = BackendShelf(backend)
        self.in_flight = InFlight()
        self._wait_s = wait_s = min(self.options.alloc_timeout_s, _limit_s(config))
        self.arrivals = Arrivals(self.shelf, lease_s=self.options.lease_s, wait_s=wait_s)
        self.caller = AllocCaller(self._is_lost, wait_s + _GRACE_S)
        self._alloc_port: AllocPort | None = None
        self._receivers: dict[str, str] = {}  # host:port of the init port

    @contextlib.contextmanager
    def constructing(self) -> Iterator[None]:
        """The block in which LMCache makes the back end's channel."""
        receives = self._config.pd_role == "receiver"
        setting = Setting(
            options=self.options,
            facts=self.facts,
            requests=self.arrivals.of if receives else None,
            written=self.written,
        )
        try:
            with constructing(setting):
                yield
        except BaseException:
            self.close()
            raise

    def facts(self) -> Facts:
        """What peers must have in common with this engine."""
        if self._facts is None:
            engine = self._engine()
            database = (
                ChunkedTokenDatabase(self._config, self._metadata)
                if engine is None
                else engine.token_database
            )
            self._facts = facts_of(self._metadata, self.shelf.page_bytes, database)
        return self._facts

    def written(self) -> After:
        """The stream on which LMCache gathers pages; nothing else orders a write behind it."""
        if self._backend.corrected_device == "cpu":
            return None
        engine = self._engine()
        stream = None if engine is None else getattr(engine.gpu_connector, "store_stream", None)
        return None if stream is None else int(stream.cuda_stream)

    def _engine(self) -> Any:
        for engine in list(LMCacheEngineBuilder._instances.values()):
            if engine.metadata is self._metadata:
                return engine
        return None

    # A receiver.

    def serve(self, host: str, port: int) -> None:
        """Answer the alloc port, on the host that the user named and no other.

        Raises:
            NotAvailable: it cannot be bound.
        """
        self._alloc_port = AllocPort(f"{host}:{port}", self.arrivals)

    def look_for(self, key: Any) -> None:
        """To be called before the back end looks for a key among its hits."""
        self.arrivals.publish_arrived()
        self.shelf.touch(key)

    # A sender.

    def may_send(self, spec: Any) -> bool:
        """Whether a batch of the request goes to a receiver.

        It does not where the request names none, or where an earlier batch of it was lost.

        Raises:
            InvalidUsage: it names fewer ranks than this side has.
        """
        if spec is None:
            return False
        rank = self._backend.tp_rank
        for name in ("receiver_init_port", "receiver_alloc_port"):
            ports = getattr(spec, name)
            if rank >= len(ports):
                raise InvalidUsage(
                    f"request {spec.req_id!r} names {len(ports)} ports in {name}; this is rank "
                    f"{rank} of {self._metadata.world_size}: run the receiver with as many ranks, "
                    "and list a port of each"
                )
        if has_failed(spec):
            _log.error("request %r is sent no further: part of it was lost", spec.req_id)
        return not has_failed(spec)

    def await_room(self) -> None:
        """Wait until this sender has a free page; see `InFlight.await_room`."""
        self.in_flight.await_room(self.shelf, self._wait_s)

    def meet(self, receiver_id: str, host: str, init_port: int, alloc_port: int) -> None:
        """Meet a receiver, unless it was met before.

        Raises:
            KvxferError: it cannot be met; see `Peers.meet`.
        """
        url = f"{host}:{init_port}"
        if self._receivers.get(receiver_id) != url:
            self._backend.transfer_channel.lazy_init_peer_connection(
                local_id=self._backend.local_id, peer_id=receiver_id, peer_init_url=url
            )
            self._receivers[receiver_id] = url
        self.caller.know(receiver_id, f"{host}:{alloc_port}")

    def allocate(self, receiver_id: str, message: Any, **more: object) -> AllocResponse:
        """Ask a receiver for pages, or tell it that a request is over.

        Args:
            receiver_id: whom.
            message: LMCache's own.
            more: fields that the message does not have.

        Raises:
            NotAvailable: it has none for this request, and why.
            KvxferError: it is gone, or does not answer.
        """
        channel = self._backend.transfer_channel
        peer = channel.connection_to(receiver_id)
        asker = None if peer is None else Asker(connection=peer.connection, wait_s=self._wait_s)
        fields = {name: getattr(message, name) for name in message.__struct_fields__}
        kind = AllocRequest if hasattr(message, "fmt") else CancelNotif
        request = kind(**{**more, **fields, "kvxfer": asker})
        answer = decode(self.caller.call(receiver_id, encode(request)), AllocResponse)
        grant = answer.kvxfer
        if -1 in answer.remote_indexes:
            reason = "it does not say why" if grant is None else grant.error
            raise NotAvailable(f"{receiver_id} has no pages: {reason}")
        if grant is not None and peer is not None and answer.remote_indexes:
            channel.granted(receiver_id, answer.remote_indexes, grant, peer)
        return answer

    def close(self) -> None:
        """Stop serving and asking; may be called more than once."""
        if self._alloc_port is not None:
            self._alloc_port.close()
        self.caller.close()

    def _is_lost(self, receiver_id: str) -> bool:
        return bool(self._backend.transfer_channel.is_lost(receiver_id))


class PDHooks:
    """What both back ends override alike; stands before LMCache's class among the bases."""

    _parts: PDParts
    pd_config: Any

    # A sender.

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        """A page; a sender waits for one as long as some are on their way out.

        Raises:
            KvxferError: there will be none; see `InFlight.await_room`.
        """
        if self.pd_config.role == "sender":
            self._parts.await_room()
        return super().allocate(*args, **kwargs)  # type: ignore[misc]

    def _ensure_peer_connection(
        self,
        receiver_id: str,
        receiver_host: str,
        receiver_init_port: int,
        receiver_alloc_port: int,
    ) -> None:
        self._parts.meet(receiver_id, receiver_host, receiver_init_port, receiver_alloc_port)

    # A receiver.

    def contains(self, key: Any, pin: bool = False) -> bool:
        """Whether all bytes of a key are here; who asks means to fetch it."""
        self._parts.look_for(key)
        return bool(super().contains(key, pin))  # type: ignore[misc]

    def get_blocking(self, key: Any) -> Any:
        """The object of a key that is here."""
        self._parts.look_for(key)
        return super().get_blocking(key)  # type: ignore[misc]

    def remove(self, key: Any, force: bool = True) -> bool:
        """Take a key off the hits, unless others will fetch it."""
        is_known = bool(super().remove(key, force))  # type: ignore[misc]
        self._parts.shelf.forget(key)
        return is_known


def pages_of_sender(engine: Any) -> int | None:
    """Pages of the pool of an engine that sends by a back end with `PDHooks`; else None."""
    parts = _parts_of(engine)
    return None if parts is None or engine.config.enable_blending else parts.shelf.num_pages


def arrivals_of(engine: Any) -> Arrivals | None:
    """What is on its way to an engine that receives by a back end with `PDHooks`; else None."""
    parts = _parts_of(engine)
    return None if parts is None or engine.config.pd_role != "receiver" else parts.arrivals


def _parts_of(engine: Any) -> PDParts | None:
    manager = engine.storage_manager
    backend: Any = None if manager is None else manager.storage_backends.get("PDBackend")
    return backend._parts if isinstance(backend, PDHooks) else None


def _limit_s(config: Any) -> float:
    limit = float(config.pd_allocation_timeout_sec)
    return _MAX_WAIT_S if math.isinf(limit) else limit
