"""What a caller holds of a request that is being sent."""

import asyncio
import time
from collections.abc import Callable, Collection, Generator

from kvxfer.errors import InvalidUsage, TransferTimeout
from kvxfer.layout import Blocks
from kvxfer.session.shipment import Shipment
from kvxfer.transport import After, mark


class SendHandle:
    """A request on its way to every rank of a receiver. Thread-safe, and may be awaited.

    The source blocks of a part must stay as they are from its push until the request has ended.

    Attributes:
        request_id: which request.
    """

    def __init__(self, shipment: Shipment, device: int) -> None:
        """Made by a :class:`Sender`, of a cache on ``device``."""
        self.request_id = shipment.request_id
        self._shipment = shipment
        self._device = device

    def push(
        self,
        blocks: Blocks,
        *,
        tokens: range | None = None,
        layers: Collection[int] | None = None,
        after: After = None,
    ) -> None:
        """Send a part of a request that :meth:`Sender.begin` began.

        Parts may come in any order, and those of one chunk of a prompt may have another block table
        than those of the next. What a receiver holds already, or what lies outside a layer's
        window, is left out. Once the request has ended this changes nothing.

        Args:
            blocks: block ids ``[n]`` here in the order of the request's tokens, a `BlockTable`, or
                `BlockTables`, one for each group of layers. A table is cheapest pushed again as
                the same object: its ids were copied and judged.
            tokens: which of the request's tokens, a range of step 1; None = all.
            layers: only these, numbered as in the whole model; None = all of this rank.
            after: the blocks are read once it is reached: a `StreamMark`, or a CUDA stream, which
                stands for what is queued on it now. None = they may be read at once.

        Raises:
            InvalidUsage: what another push has sent already, tokens or layers that are not of the
                request, blocks that do not hold them, or the request is finished. Nothing of the
                part is sent.
        """
        self._shipment.push(blocks, tokens, layers, mark(self._device, after))

    def finish(self) -> None:
        """Say that no more parts come: the request is committed once all have arrived.

        Raises:
            InvalidUsage: the parts do not have all that is to be sent; names what is missing, and
                the request is cancelled.
        """
        self._shipment.finish()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._shipment.done

    @property
    def num_bytes(self) -> int:
        """Bytes that were written; complete once it is done."""
        return self._shipment.num_bytes

    @property
    def actual_path(self) -> str:
        """What carried the bytes, read back; of ranks that differ all of them; complete at the end.

        Empty where nothing was to be moved.
        """
        return "; ".join(sorted(self._shipment.paths))

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait up to ``timeout_s``; True once every rank has all bytes and was told.

        Raises:
            KvxferError: what went wrong first, once no rank is written to any more.
        """
        return self._shipment.poll(timeout_s)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once every rank has all bytes and was told.

        Args:
            timeout_s: how long to wait; None = until it ends, which the limits of the sender bound.

        Raises:
            TransferTimeout: it has not ended within ``timeout_s``; the source may still be read.
            KvxferError: what went wrong first, once no rank is written to any more.
        """
        end_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        # In slices, because Python delivers signals (Ctrl-C) only between waits.
        while not self.poll(min(0.2, max(end_s - time.monotonic(), 0.0))):
            if time.monotonic() >= end_s:
                raise TransferTimeout(
                    f"request {self.request_id!r} was not sent within {timeout_s} s; keep its "
                    "blocks until it has ended, or cancel it and wait"
                )

    def __await__(self) -> Generator[object, None, None]:
        """Wait without blocking the event loop; for what it raises see :meth:`wait`."""
        loop = asyncio.get_running_loop()
        event = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

        self.on_end(wake)
        if not self.done:
            yield from event.wait().__await__()
        self.poll()

    def on_end(self, call: Callable[[], object]) -> None:
        """Have ``call`` run once it has ended, well or not; at once where it has.

        It runs on the sender's thread: it must be quick, and what it raises is logged.
        """
        self._shipment.on_end(call)

    def cancel(self) -> None:
        """Give the request up: its receiver is told once nothing is written any more.

        Wait for the end before the source blocks are used again. A request that is committed
        everywhere stays so.
        """
        self._shipment.give_up(f"request {self.request_id!r} was cancelled")


class LayerHandle(SendHandle):
    """A request whose layers are sent one by one, all of their tokens at once."""

    def __init__(self, shipment: Shipment, device: int, blocks: Blocks, layers: range) -> None:
        """Of ``layers`` of this rank, with one table for all."""
        super().__init__(shipment, device)
        self._blocks = blocks
        self._own = layers
        self._left = set(layers)

    def layer(self, layer: int, *, after: After = None) -> None:
        """Send a layer. After the last one of this rank the request is committed.

        Args:
            layer: its number in the whole model; each once.
            after: see :meth:`push`.

        Raises:
            InvalidUsage: a layer that this rank does not hold, or one that was sent before.
        """
        if layer not in self._left:
            raise InvalidUsage(
                f"layer {layer} of request {self.request_id!r} was sent before, or is not one "
                f"of {self._own.start} to {self._own.stop - 1}; send each of them once"
            )
        self.push(self._blocks, layers=[layer], after=after)
        self._left.discard(layer)
        if not self._left:
            self.finish()
