"""Whom a channel has met: peers with kvxfer over an endpoint, all others over LMCache's channel."""

import threading
from functools import partial
from typing import Any

from kvxfer.closing import Closing
from kvxfer.connectors.lmcache.agreement import require_agreement
from kvxfer.connectors.lmcache.greeting import ask_side, greet
from kvxfer.connectors.lmcache.init_port import InitPort
from kvxfer.connectors.lmcache.lane import Counts, Lane
from kvxfer.connectors.lmcache.pool import PagePool
from kvxfer.connectors.lmcache.serving import LOOPBACK, serve
from kvxfer.connectors.lmcache.setting import Setting
from kvxfer.connectors.lmcache.stock import StockChannel
from kvxfer.connectors.lmcache.wire import Hello
from kvxfer.errors import InvalidUsage
from kvxfer.transport import Tuning


class _WithoutKvxfer(Exception):
    """The peer is an LMCache without kvxfer."""


class Peers(Closing):
    """The peers of one pool by LMCache's ids. Thread-safe; a context manager.

    Attributes:
        stock: LMCache's own channel.
    """

    def __init__(
        self, setting: Setting, pool: PagePool, stock: StockChannel, init_url: str | None
    ) -> None:
        """Serve the pool to peers that come to ``init_url`` (host:port), where it is not None.

        Raises:
            InvalidUsage: an unusable host or setting.
            NotAvailable: a port is taken, or no transport works here.
        """
        self.stock = stock
        self._setting = setting
        self._lanes: dict[str, Lane] = {}
        self._retired: list[Lane] = []  # to peers that have ended
        self._urls: dict[str, str] = {}
        self._without: set[str] = set()
        self._callers: dict[str, Hello] = {}  # who wants to be written to under its local_id
        self._lock = threading.Lock()
        self._init_port: InitPort | None = None
        if init_url is not None:
            self._init_port = InitPort(init_url, self._was_met, lambda: self.stock)
        try:
            self._endpoint = serve(
                pool,
                LOOPBACK if init_url is None else init_url.rpartition(":")[0],
                key_file=setting.options.key_file,
                transport=setting.options.transport,
                num_threads=setting.options.num_threads,
                requests=setting.requests,
            )
        except BaseException:
            if self._init_port is not None:
                self._init_port.close()
            raise
        if self._init_port is not None:
            self._init_port.start()

    def meet(self, local_id: str, peer_id: str, url: str) -> bool:
        """Meet whoever is at ``url``, called ``peer_id`` from now on; False if without kvxfer.

        Raises:
            ControlTimeout: nobody answers there.
            LayoutMismatch: what is sent there would not be found there.
            NotAvailable: it cannot be reached, and why.
            InvalidUsage: another peer has that name.
        """
        known = self._urls.get(peer_id, url)
        if known != url:
            raise InvalidUsage(
                f"{peer_id!r} stands for {known} and for {url}; give one of them another port"
            )
        try:
            self._lane(peer_id, partial(self._greet, local_id, url)).connect()
        except _WithoutKvxfer:
            self._without.add(peer_id)
        else:
            self._without.discard(peer_id)
        self._urls[peer_id] = url
        return peer_id not in self._without

    def ask_side(self, url: str, message: Any, kind: Any) -> Any:
        """The answer to a side message of LMCache's P2P.

        Raises:
            ControlTimeout: no answer.
        """
        return ask_side(url, message, kind, self._setting.options.connect_timeout_s)

    def lane_to(self, peer_id: str) -> Lane | None:
        """How pages get to a peer; None where LMCache's own channel takes them.

        Raises:
            InvalidUsage: it was never met.
        """
        if peer_id in self._without:
            return None
        lane = self._lanes.get(peer_id)
        if lane is not None:
            return lane
        if peer_id in self._callers:
            return self._lane(peer_id, lambda: self._callers[peer_id])
        raise InvalidUsage(
            f"{peer_id!r} was never met; known are {', '.join(self._urls) or 'none'}"
        )

    def can_reach(self, peer_id: str) -> bool:
        """Whether a write to that peer may succeed, as far as is known here."""
        lane = self._lanes.get(peer_id)
        if lane is not None:
            return lane.is_open
        if peer_id in self._callers:
            return True
        return bool(self.stock.is_made and self.stock.channel.remote_xfer_handler_exists(peer_id))

    def counts(self) -> dict[str, Counts]:
        """What went to each peer with kvxfer."""
        with self._lock:
            return {name: lane.counts for name, lane in self._lanes.items()}

    def close(self) -> None:
        """End what is in flight, unmap peers and free the port; may be called more than once."""
        if self._init_port is not None:
            self._init_port.close()
        with self._lock:
            lanes = [*self._lanes.values(), *self._retired]
        for lane in lanes:
            lane.close()
        self._endpoint.close()
        self.stock.close()

    def _lane(self, peer_id: str, greet: Any) -> Lane:
        with self._lock:
            if peer_id not in self._lanes:
                options = self._setting.options
                self._lanes[peer_id] = Lane(
                    peer_id,
                    self._endpoint,
                    greet,
                    tuning=Tuning(num_sms=options.num_sms),
                    connect_timeout_s=options.connect_timeout_s,
                )
            return self._lanes[peer_id]

    def _greet(self, local_id: str, url: str) -> Hello:
        options = self._setting.options
        own = Hello(
            addresses=self._endpoint.addresses, facts=self._setting.facts(), local_id=local_id
        )
        hello = greet(url, own, self._metadata, options.connect_timeout_s)
        if hello is None:
            raise _WithoutKvxfer
        if own.facts is not None and hello.facts is not None:
            require_agreement(own.facts, hello.facts, url)
        return hello

    def _metadata(self) -> bytes:
        return self.stock.metadata() if self._setting.options.peers == "any" else b""

    def _was_met(self, hello: Hello) -> Hello:
        if hello.local_id:
            with self._lock:
                self._callers[hello.local_id] = hello
                lane = self._lanes.get(hello.local_id)
                if lane is not None and lane.has_lost:
                    # Who asks is the successor of whom that lane went to.
                    self._retired = [one for one in self._retired if not one.is_over]
                    self._retired.append(self._lanes.pop(hello.local_id))
                    lane.retire()
        return Hello(addresses=self._endpoint.addresses, facts=self._setting.facts())
