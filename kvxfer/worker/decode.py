"""A decode worker: it takes requests into its blocks, checks every byte, and frees the blocks."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from kvxfer.closing import Closing
from kvxfer.control import ControlServer
from kvxfer.layout.conversion import SOURCES
from kvxfer.memory import MemoryKind
from kvxfer.session import Notice, Receiver
from kvxfer.session.layouts import layout_spec
from kvxfer.sweep.host_memory import require_host_memory
from kvxfer.sweep.messages import Checked
from kvxfer.sweep.patterned_cache import PatternedCache
from kvxfer.worker.content import content_of, tokens_in_blocks
from kvxfer.worker.messages import AskOutcome, AskWorker, Outcome, WorkerInfo
from kvxfer.worker.options import WorkerOptions, device_of
from kvxfer.worker.outcomes import Outcomes

_SETTLE_S = 1.0
_LEAVE_S = 0.2
CHANNEL = "worker"
CHANNELS = (CHANNEL, "init", "alloc")


@dataclass(frozen=True, slots=True)
class Received:
    """How a request ended.

    Attributes:
        request_id: which.
        num_tokens: its tokens.
        num_checked_bytes: bytes that were compared; 0 where nothing is known of its content.
        wrong: why it failed, or what is wrong with its bytes; empty where all is well.
    """

    request_id: str
    num_tokens: int
    num_checked_bytes: int
    wrong: str = ""


class DecodeWorker(Closing):
    """One rank of a decode worker. A context manager.

    Attributes:
        transport: what it serves, or ``auto``.
        addresses: its channels: those of a receiver, and ``worker``, which says all of them.
        num_bytes: of its cache.
        num_wrong: requests that arrived with wrong bytes.
    """

    def __init__(
        self,
        options: WorkerOptions,
        num_blocks: int,
        *,
        ports: Mapping[str, int] | None = None,
        advertise_host: str | None = None,
    ) -> None:
        """Allocate a cache of ``num_blocks`` and serve it.

        Args:
            options: what it is.
            num_blocks: blocks of its pool.
            ports: of the channels ``worker``, ``init`` and ``alloc``; absent or 0 takes a free one.
            advertise_host: what peers dial, where that is not ``bind_host``.

        Raises:
            InvalidUsage: options that contradict each other, or a bind beyond loopback without a
                key.
            NotAvailable: the transport does not work here, a port is in use, or memory is short.
        """
        self.num_wrong = 0
        self.transport = options.transport
        device = device_of(options)
        on_device = device >= 0
        self._memory = MemoryKind.DEVICE if on_device else MemoryKind.HOST
        ports = dict(ports or {})
        guard = {
            "bind_host": options.bind_host,
            "advertise_host": advertise_host,
            "key": options.key,
            "insecure": options.insecure,
        }
        self.num_bytes = num_blocks * options.rank.rank_layout(options.layout).block_bytes
        if not on_device:
            require_host_memory(self.num_bytes, remedy="use fewer --blocks")
        self._options = options
        self._outcomes = Outcomes()
        with ExitStack() as stack:
            self._pool = PatternedCache(
                options.layout,
                num_blocks,
                memory="device" if on_device else "shared",
                device=device,
                num_threads=options.check_threads,
                rank=options.rank,
            )
            stack.callback(self._pool.close)
            self._receiver = Receiver(
                self._pool.cache,
                transport=self.transport,
                num_threads=options.num_threads,
                ports={name: ports[name] for name in ("init", "alloc") if name in ports},
                **guard,  # type: ignore[arg-type]
            )
            stack.callback(self._receiver.close)
            server = ControlServer(
                {CHANNEL: {AskWorker: self._describe, AskOutcome: self._outcomes.ask}},
                ports={CHANNEL: ports.get(CHANNEL, 0)},
                **guard,  # type: ignore[arg-type]
            )
            stack.callback(server.close)
            self.addresses = dict(server.addresses) | dict(self._receiver.addresses)
            self._stack = stack.pop_all()

    def next(self, timeout_s: float) -> Received | None:
        """Wait for the end of a request, check it and free its blocks; None where none came."""
        notice = self._receiver.poll(timeout_s)
        if notice is None:
            return None
        received = self._judge(notice)
        if notice.ok:
            self._receiver.release(notice.request_id)
            self.num_wrong += bool(received.wrong)
        self._outcomes.add(
            Outcome(
                request_id=received.request_id,
                num_checked_bytes=received.num_checked_bytes,
                wrong=received.wrong[:4096],
            )
        )
        return received

    def settle(self) -> None:
        """Let the senders hear how their requests ended, before this closes; takes a second."""
        self._outcomes.wait_told(_SETTLE_S)
        time.sleep(_LEAVE_S)  # the last answer is on its way

    def close(self) -> None:
        """Stop serving and free the cache; may be called more than once."""
        self._stack.close()

    def _describe(self, _: AskWorker) -> WorkerInfo:
        rank = self._options.rank
        return WorkerInfo(
            addresses=self.addresses,
            transport=self.transport,
            layout=layout_spec(self._options.layout),
            tp_size=rank.tp_size,
            pp_size=rank.pp_size,
            memory=self._memory.value,
        )

    def _judge(self, notice: Notice) -> Received:
        count = len(notice.tokens)
        if not notice.ok:
            return Received(notice.request_id, count, 0, notice.reason)
        found = self._check(notice)
        if found is None:
            return Received(notice.request_id, count, 0)
        wrong = ""
        if found.num_wrong:
            wrong = (
                f"{found.num_wrong * found.unit} of {found.num_checked * found.unit} bytes are "
                f"wrong, the first in {found.first}"
            )
        return Received(notice.request_id, count, found.num_checked * found.unit, wrong)

    def _check(self, notice: Notice) -> Checked | None:
        content = content_of(notice.request_id)
        dtype = self._options.layout.dtype
        if content is None or not notice.block_ids:
            return None
        converted = content.dtype != dtype and content.dtype in SOURCES
        if content.dtype != dtype and not converted:
            return None
        runs = tokens_in_blocks(
            np.array(notice.block_ids, np.int64),
            self._options.layout.block_size,
            notice.tokens,
            notice.first_token,
        )
        return self._pool.check(
            content.seed, runs, converted_from=content.dtype if converted else "none"
        )
