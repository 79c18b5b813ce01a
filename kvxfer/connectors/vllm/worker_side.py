"""The connector in a worker: its cache, and the receiver and sender that stand on it."""

import logging
from collections.abc import Iterable

from kvxfer.connectors.vllm.cache_map import CacheMap
from kvxfer.connectors.vllm.config import ConnectorConfig
from kvxfer.connectors.vllm.counters import Counters
from kvxfer.connectors.vllm.digests import Digests
from kvxfer.connectors.vllm.receive_side import Ended, ReceiveSide
from kvxfer.connectors.vllm.send_side import SendSide
from kvxfer.connectors.vllm.step import StepPlan
from kvxfer.memory import KVCache
from kvxfer.session import ReceiveLimits, Receiver, Sender, SendLimits
from kvxfer.transport import After, Tuning, tuned

_log = logging.getLogger(__name__)


class WorkerSide:
    """One rank of an engine.

    Attributes:
        counters: what has happened.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        caches: CacheMap,
        *,
        is_producer: bool,
        is_consumer: bool,
        tells_failures: bool = True,
    ) -> None:
        """Register the caches, and open the channels of a rank that receives.

        Args:
            config: the settings.
            caches: vLLM's.
            is_producer: it sends.
            is_consumer: it receives.
            tells_failures: see `ReceiveSide`.

        Raises:
            InvalidUsage: unusable hosts or ports.
            NotAvailable: the transport does not work here, or a port is in use.
            RegistrationError: the caches cannot be exported.
        """
        self.counters = Counters()
        self._layer_of = caches.layer_of
        self._layerwise = config.sends_layerwise
        self._cache = KVCache(caches.layout, caches.arrays, rank=caches.rank)
        self._digests = Digests.wanted(caches, self._cache.shard)
        pages = caches.pages
        self._receive: ReceiveSide | None = None
        self._send: SendSide | None = None
        self._receiver: Receiver | None = None
        self._sender: Sender | None = None
        try:
            if is_consumer:
                self._receive = ReceiveSide(
                    pages,
                    self.counters,
                    timeout_s=config.receive_timeout_s,
                    tells_failures=tells_failures,
                )
                self._receiver = _receiver(config, self._cache, self._receive)
                self._receive.attach(self._receiver, self._cache.layout)
            if is_producer:
                self._sender = _sender(config, self._cache)
                tuning = Tuning(num_sms=config.num_sms)
                layers = self._cache.shard.layers
                self._send = SendSide(self._sender, layers, pages, self.counters, tuning)
        except BaseException:
            self.close()
            raise
        _log.info(
            "KV cache: %d layers in %d groups, %s pages of %d tokens, %s",
            len(caches.layer_of),
            caches.layout.num_groups,
            pages.format,
            pages.block_units * pages.unit_tokens,
            f"received at {self._receiver.addresses}" if self._receiver else "sent",
        )
        _log.info("tuning profile: %s", tuned.in_use().text)

    @property
    def device(self) -> int:
        """CUDA device index of the caches, or -1 for host memory."""
        return self._cache.device

    @property
    def wants_marks(self) -> bool:
        """Whether this step sends anything."""
        return self._send is not None and self._send.has_parts

    def begin_step(self, plan: StepPlan) -> None:
        """Take up what the scheduler says, before the step runs."""
        if self._digests is not None:
            self._digests.begin_step(plan)
        if self._receive is not None:
            self._receive.begin_step(plan)
        if self._send is not None:
            self._send.begin_step(plan)

    def layer_ready(self, name: str, after: After) -> None:
        """A layer's KV of this step is queued up to ``after``."""
        number = self._layer_of.get(name)
        if self._send is not None and self._layerwise and number is not None:
            self._send.layer_ready(number, after)

    def end_step(self, after: After) -> None:
        """All of the step is queued up to ``after``."""
        if self._send is not None:
            self._send.end_step(after)

    def take_sent(self, ended_in_engine: Iterable[str]) -> set[str]:
        """Requests that vLLM has ended and whose blocks nobody reads any more."""
        sent = set() if self._send is None else self._send.take_ended(ended_in_engine)
        if self._digests is not None:
            self._digests.sent(sent)
        return sent

    def take_received(self) -> list[Ended]:
        """Requests whose wait for KV is over."""
        received = [] if self._receive is None else self._receive.take_ended()
        if self._digests is not None:
            self._digests.received(received)
        return received

    def close(self) -> None:
        """Fail what is open, and let go of the caches; bounded, and repeatable."""
        for one in (self._sender, self._receiver, self._digests, self._cache):
            if one is not None:
                one.close()


def _receiver(config: ConnectorConfig, cache: KVCache, side: ReceiveSide) -> Receiver:
    rank = cache.shard.rank
    timeout_s = config.receive_timeout_s
    return Receiver(
        cache,
        transport=config.transport,
        num_threads=config.num_threads,
        bind_host=config.bind_host,
        ports=config.ports(rank.tp_size * rank.pp_size),
        advertise_host=config.advertise_host,
        key=config.key(),
        insecure=config.insecure,
        limits=ReceiveLimits(wait_s=timeout_s, receive_s=timeout_s),
        on_reserve=side.on_reserve,
        on_notice=side.on_notice,
        on_free=side.on_free,
    )


def _sender(config: ConnectorConfig, cache: KVCache) -> Sender:
    timeout_s = config.send_timeout_s
    return Sender(
        cache,
        transport=config.transport,
        num_threads=config.num_threads,
        bind_host=config.bind_host,
        key=config.key(),
        insecure=config.insecure,
        # A decoder that was lost may just have been silent: if it has not heard of the request, it
        # takes it from a second try; if it has, it has ended it, and refuses.
        limits=SendLimits(reserve_s=timeout_s, move_s=timeout_s, num_attempts=2),
    )
