"""The prefill side in a worker: parts of requests handed to the sender as they become ready."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvxfer.connectors.vllm.counters import Counters
from kvxfer.connectors.vllm.pages import Pages
from kvxfer.connectors.vllm.params import attempt_id
from kvxfer.connectors.vllm.step import Part, SendStart, StepPlan
from kvxfer.errors import KvxferError
from kvxfer.layout import BlockTables
from kvxfer.session import Sender, SendHandle
from kvxfer.transport import After, Tuning

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Outgoing:
    """A request's attempts; only the last counts, but all read its blocks until they have ended."""

    handles: list[SendHandle] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return all(handle.done for handle in self.handles)


@dataclass(slots=True)
class _Ready:
    """A part of this step.

    Attributes:
        units: of the request, that are ready with it.
        unsent: layers that are not pushed yet.
    """

    handle: SendHandle
    blocks: BlockTables
    units: range
    is_last: bool
    unsent: set[int]

    def push(self, layers: Collection[int], after: After) -> None:
        self.unsent.difference_update(layers)
        self.handle.push(self.blocks, tokens=self.units, layers=layers, after=after)


class SendSide:
    """Sends what a step computes. Nothing here waits: copies run on the sender's threads."""

    def __init__(
        self,
        sender: Sender,
        layers: Sequence[int],
        pages: Pages,
        counters: Counters,
        tuning: Tuning | None = None,
    ) -> None:
        """Of a rank that holds ``layers``, numbered as in the whole model."""
        self._sender = sender
        self._layers = tuple(layers)
        self._pages = pages
        self._counters = counters
        self._tuning = tuning
        self._outgoing: dict[str, _Outgoing] = {}
        self._ended_in_engine: set[str] = set()
        self._ready: list[_Ready] = []
        self._known_paths: set[tuple[str, str]] = set()

    @property
    def has_parts(self) -> bool:
        """Whether this step makes anything ready."""
        return bool(self._ready)

    def begin_step(self, plan: StepPlan) -> None:
        """Take up what the scheduler says, before the step runs."""
        for start in plan.starts:
            self._begin(start)
        for request_id in plan.cancelled:
            for handle in self._handles(request_id):
                handle.cancel()
        self._ready = [
            self._part_ready(part, handles[-1])
            for part in plan.parts
            if (handles := self._handles(part.request_id))
        ]

    def layer_ready(self, layer: int, after: After = None) -> None:
        """A layer's KV of this step is written, or will be once ``after`` is reached.

        Called again for a layer in one step, this changes nothing.
        """
        for ready in self._ready:
            if layer in ready.unsent:
                _or_cancel(ready.handle, partial(ready.push, [layer], after))

    def end_step(self, after: After = None) -> None:
        """All of the step is queued: push what no layer call has, and close what is complete."""
        for ready in self._ready:
            if ready.unsent:
                _or_cancel(ready.handle, partial(ready.push, sorted(ready.unsent), after))
            if ready.is_last:
                _or_cancel(ready.handle, ready.handle.finish)
        self._ready = []

    def take_ended(self, ended_in_engine: Iterable[str]) -> set[str]:
        """Requests that vLLM has ended and whose blocks nobody reads any more; each once.

        Args:
            ended_in_engine: requests that vLLM has ended since the last call.
        """
        self._ended_in_engine.update(name for name in ended_in_engine if name in self._outgoing)
        over = {name for name in self._ended_in_engine if self._outgoing[name].is_over}
        self._ended_in_engine -= over
        for name in over:
            del self._outgoing[name]
        return over

    def _begin(self, start: SendStart) -> None:
        outgoing = self._outgoing.setdefault(start.request_id, _Outgoing())
        replaced = list(outgoing.handles)
        addresses = [{"init": one.init, "alloc": one.alloc} for one in start.receivers]
        try:
            handle = self._sender.begin(
                attempt_id(start.transfer_id, start.attempt, self._pages.format),
                to=addresses,
                tokens=range(self._pages.num_units(start.num_tokens)),
                tuning=self._tuning,
            )
        except KvxferError as error:
            self._counters.add(num_failed_sends=1)
            _log.error("request %s is not sent: %s", start.request_id, error)
        else:
            peer = ", ".join(one["alloc"] for one in addresses)
            handle.on_end(partial(self._on_end, handle, peer, time.monotonic()))
            outgoing.handles.append(handle)
        for earlier in replaced:
            earlier.cancel()

    def _handles(self, request_id: str) -> list[SendHandle]:
        outgoing = self._outgoing.get(request_id)
        return outgoing.handles if outgoing else []

    def _part_ready(self, part: Part, handle: SendHandle) -> _Ready:
        units = self._pages.units_of(part.tokens, is_last=part.is_last)
        blocks = self._pages.source(part.tables)
        layers = set(self._layers) if units else set()
        return _Ready(handle, blocks, units, part.is_last, layers)

    def _on_end(self, handle: SendHandle, peer: str, began_s: float) -> None:
        """On the sender's thread."""
        try:
            handle.poll()
        except KvxferError as error:
            self._counters.add(num_failed_sends=1)
            _log.warning("transfer %s failed: %s", handle.request_id, error)
            return
        self._counters.add_sent(handle.num_bytes, time.monotonic() - began_s)
        path = handle.actual_path
        if path and (peer, path) not in self._known_paths:
            self._known_paths.add((peer, path))
            _log.info("KV to %s goes by %s", peer, path)


def _or_cancel(handle: SendHandle, call: Callable[[], None]) -> None:
    """Use a handle; what fails ends its request alone."""
    try:
        call()
    except KvxferError as error:
        _log.error("transfer %s goes no further: %s", handle.request_id, error)
        handle.cancel()
