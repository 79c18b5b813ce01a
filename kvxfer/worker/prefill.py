"""A prefill worker: it holds requests of a known pattern and sends them, timed."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.closing import Closing
from kvxfer.control import ControlClient
from kvxfer.errors import VerificationError
from kvxfer.layout import ToFp8
from kvxfer.session import Sender
from kvxfer.sweep.host_memory import require_host_memory
from kvxfer.sweep.patterned_cache import PatternedCache
from kvxfer.sweep.stats import percentile
from kvxfer.units import gb_per_s
from kvxfer.worker.content import content_of, request_name, tokens_in_blocks
from kvxfer.worker.messages import AskOutcome, Outcome
from kvxfer.worker.options import WorkerOptions, device_of

# Checking gigabytes takes seconds, and a request that other ranks share waits for them.
_OUTCOME_S = 120.0
LESS_MEMORY = "use fewer --tokens or a lower --concurrency"
_POOL_FACTOR = 2  # the pool has more blocks than the requests, as an engine's

Addresses = Mapping[str, str]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendResult:
    """What was sent, and how fast.

    Attributes:
        num_requests: requests that were timed.
        num_tokens: tokens of each.
        concurrency: requests on their way at a time.
        request_bytes: bytes that this rank sent of each.
        gb_per_s: all bytes over the time in which any request was on its way, 1e9 bytes a second.
        latency_p50_ms: from handing a request in until every rank had all of it and was told.
        latency_p99_ms: the same.
        actual_path: what carried the bytes.
        num_checked_bytes: bytes that the receivers compared, of all requests.
        checked: whether the receivers checked every byte of this rank's.
    """

    num_requests: int
    num_tokens: int
    concurrency: int
    request_bytes: int
    gb_per_s: float
    latency_p50_ms: float
    latency_p99_ms: float
    actual_path: str
    num_checked_bytes: int
    checked: bool


@dataclass(frozen=True, slots=True)
class _Sent:
    latency_s: float
    num_bytes: int
    path: str


class PrefillWorker(Closing):
    """One rank of a prefill worker. A context manager.

    Attributes:
        transport: what it sends over, or ``auto``.
        num_bytes: of its cache.
    """

    def __init__(
        self,
        options: WorkerOptions,
        *,
        num_tokens: int,
        concurrency: int = 1,
        convert: ToFp8 | None = None,
        seed: int = 0,
    ) -> None:
        """Allocate a cache for ``concurrency`` requests of ``num_tokens``.

        Args:
            options: what it is.
            num_tokens: tokens of a request.
            concurrency: requests that are on their way at a time.
            convert: turn what is sent into fp8.
            seed: of the block tables, whose ids are shuffled.

        Raises:
            InvalidUsage: a bind beyond loopback without a key.
            NotAvailable: the transport does not work here, or memory is short.
        """
        self.transport = options.transport
        device = device_of(options)
        on_device = device >= 0
        layout = options.layout
        self._key = options.key
        self._layout = layout
        self._num_tokens = num_tokens
        self._concurrency = concurrency
        per_request = layout.num_blocks(num_tokens)
        num_blocks = _POOL_FACTOR * concurrency * per_request
        self.num_bytes = num_blocks * options.rank.rank_layout(layout).block_bytes
        if not on_device:
            require_host_memory(self.num_bytes, remedy=LESS_MEMORY)
        order = np.random.default_rng(seed).permutation(num_blocks).astype(np.int64)
        self._tables: list[Ids] = np.split(order[: concurrency * per_request], concurrency)
        with ExitStack() as stack:
            self._pool = PatternedCache(
                layout,
                num_blocks,
                memory="device" if on_device else "private",
                device=device,
                num_threads=options.check_threads,
                rank=options.rank,
            )
            stack.callback(self._pool.close)
            self._sender = Sender(
                self._pool.cache,
                transport=self.transport,
                num_threads=options.num_threads,
                convert=convert,
                bind_host=options.bind_host,
                key=options.key,
                insecure=options.insecure,
                strict=options.strict,
            )
            stack.callback(self._sender.close)
            self._stack = stack.pop_all()

    def run(
        self, to: Sequence[Addresses], *, name: str, num_requests: int, num_warmup: int = 1
    ) -> SendResult:
        """Send requests to a receiver, and have it check them.

        As many as ``concurrency`` are handed in at once; the next follow when all of these have
        ended and were checked, so that nothing but the requests runs while they are timed.

        Args:
            to: the addresses of each of its ranks; one with ``worker`` is asked for its checks.
            name: of this run, new at the receiver; ranks that share requests have the same.
            num_requests: requests that are timed.
            num_warmup: requests before those, which meet the receiver and touch its memory.

        Raises:
            VerificationError: a receiver has found wrong bytes.
            KvxferError: a request failed, and why.
        """
        with ExitStack() as stack:
            checkers = [
                stack.enter_context(
                    ControlClient(one["worker"], Outcome, deadline_s=_OUTCOME_S, key=self._key)
                )
                for one in to
                if "worker" in one
            ]
            numbers = iter(range(num_warmup + num_requests))
            for count in self._batches(num_warmup):
                self._round(to, checkers, [next(numbers) for _ in range(count)], name)
            sent: list[_Sent] = []
            busy_s, num_checked, all_checked = 0.0, 0, len(checkers) == len(to)
            for count in self._batches(num_requests):
                some, checked = self._round(
                    to, checkers, [next(numbers) for _ in range(count)], name
                )
                sent += some
                busy_s += max(one.latency_s for one in some)
                num_checked += sum(checked)
                all_checked = all_checked and all(checked)
        total = sum(one.num_bytes for one in sent)
        latencies_ms = [one.latency_s * 1e3 for one in sent]
        return SendResult(
            num_requests=len(sent),
            num_tokens=self._num_tokens,
            concurrency=self._concurrency,
            request_bytes=total // len(sent),
            gb_per_s=gb_per_s(total, busy_s),
            latency_p50_ms=percentile(latencies_ms, 50),
            latency_p99_ms=percentile(latencies_ms, 99),
            actual_path="; ".join(sorted({one.path for one in sent})),
            num_checked_bytes=num_checked,
            checked=all_checked,
        )

    def close(self) -> None:
        """Leave the receivers and free the cache; may be called more than once."""
        self._stack.close()

    def _batches(self, count: int) -> list[int]:
        full, rest = divmod(count, self._concurrency)
        return [self._concurrency] * full + [rest] * (rest > 0)

    def _round(
        self,
        to: Sequence[Addresses],
        checkers: Sequence[ControlClient[Outcome]],
        numbers: Sequence[int],
        name: str,
    ) -> tuple[list[_Sent], list[int]]:
        """Send requests at once; returns how, and the bytes that each receiver checked of each."""
        names = [request_name(name, number, self._layout.dtype) for number in numbers]
        for request_id, table in zip(names, self._tables, strict=False):
            self._fill(request_id, table)
        sent = asyncio.run(self._send_all(to, names))
        outcomes = [one.call(AskOutcome(request_id)) for request_id in names for one in checkers]
        wrong = [f"{one.request_id}: {one.wrong}" for one in outcomes if one.wrong]
        if wrong:
            raise VerificationError(f"the receiver has found what is wrong: {wrong[0]}")
        return sent, [one.num_checked_bytes for one in outcomes]

    def _fill(self, request_id: str, table: Ids) -> None:
        content = content_of(request_id)
        assert content is not None, "a name of request_name"
        tokens = range(self._num_tokens)
        self._pool.fill_tokens(
            content.seed, tokens_in_blocks(table, self._layout.block_size, tokens)
        )

    async def _send_all(self, to: Sequence[Addresses], names: Sequence[str]) -> list[_Sent]:
        begin_s = time.perf_counter()
        handles = [
            self._sender.send(request_id, table, to=list(to), tokens=range(self._num_tokens))
            for request_id, table in zip(names, self._tables, strict=False)
        ]

        async def end_of(index: int) -> _Sent:
            handle = handles[index]
            await handle
            return _Sent(time.perf_counter() - begin_s, handle.num_bytes, handle.actual_path)

        return list(await asyncio.gather(*map(end_of, range(len(handles)))))
