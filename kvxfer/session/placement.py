"""Where a receiver's requests get their blocks: its own pool, or an engine's scheduler."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from itertools import islice

from kvxfer.control import ReserveRequest
from kvxfer.errors import InvalidUsage
from kvxfer.layout import BlockTable, KVLayout
from kvxfer.session.block_pool import BlockPool
from kvxfer.session.grants import misfit
from kvxfer.session.offers import Deferred, Granted, Offer, OnReserve, Refused, ids_of

Give = Callable[[Granted | Refused], bool]


class Placement(ABC):
    """Blocks for requests, and which of them a sender may still write."""

    def __init__(self, num_blocks: int, layout: KVLayout) -> None:
        """For a cache of ``num_blocks`` blocks of a model of ``layout``."""
        self.num_blocks = num_blocks
        self.layout = layout
        self._written: dict[str, tuple[int, ...]] = {}  # blocks that a sender may write
        self._written_ids: set[int] = set()

    @abstractmethod
    def enqueue(self, offer: Offer) -> None:
        """A new request, which :meth:`ask` or :meth:`next_in_queue` will give blocks."""

    @abstractmethod
    def ask(self, offer: Offer, give: Give) -> Granted | None:
        """Have ``give`` called with an answer, now or later; called without the book's lock.

        Returns:
            A grant that was given at once and came too late all the same.
        """

    @abstractmethod
    def next_in_queue(self) -> tuple[str, Granted] | None:
        """The request whose turn it is, with its blocks; None where there is none, or it waits."""

    @abstractmethod
    def free(self, request_id: str) -> None:
        """Take a request's blocks back; where it has none this changes nothing."""

    def offer_of(self, request: ReserveRequest) -> Offer:
        """What a sender asks for, in this cache's blocks.

        Raises:
            InvalidUsage: its tokens are another number of blocks here.
        """
        (first, end), size = request.tokens, self.layout.block_size
        tokens = range(first, end) if end else range(request.num_blocks * size)
        offer = Offer(request.request_id, tokens, self.layout.needed_blocks(tokens))
        if offer.num_blocks != request.num_blocks:
            raise InvalidUsage(
                f"tokens {tokens.start} to {tokens.stop} are {offer.num_blocks} blocks of {size} "
                f"tokens here, not {request.num_blocks}"
            )
        return offer

    def checked(self, offer: Offer, granted: Granted) -> tuple[BlockTable, ...]:
        """The tables of a grant, whose blocks are written from now on.

        Raises:
            InvalidUsage: they are too few or too many, outside the cache, twice, or still written
                by the sender of another request.
        """
        tables = granted.tables
        ids = ids_of(tables)
        wrong = misfit(
            self.layout, offer.tokens, [(one.block_ids.size, one.first_token) for one in tables]
        )
        if wrong:
            raise InvalidUsage(f"request {offer.request_id!r}: {wrong}")
        if len(set(ids)) != len(ids) or (ids and not 0 <= min(ids) <= max(ids) < self.num_blocks):
            raise InvalidUsage(
                f"blocks for request {offer.request_id!r} repeat or are outside 0 to "
                f"{self.num_blocks - 1}"
            )
        busy = self._written_ids & set(ids)
        if busy:
            raise InvalidUsage(
                f"block {min(busy)} for request {offer.request_id!r} may still be written by the "
                "sender of another one; use it once that is over"
            )
        self._written[offer.request_id] = ids
        self._written_ids |= set(ids)
        return tables

    def _first_tokens(self, offer: Offer) -> list[int]:
        return [blocks.start * self.layout.block_size for blocks in offer.blocks]

    def settle(self, request_id: str) -> None:
        """No sender may write the request's blocks any more."""
        self._written_ids -= set(self._written.pop(request_id, ()))


class PoolPlacement(Placement):
    """Blocks of a pool, in the order of asking: nobody holds a part and waits for the rest."""

    def __init__(self, pool: BlockPool, num_blocks: int, layout: KVLayout) -> None:
        """From ``pool``, of a cache of ``num_blocks`` blocks of a model of ``layout``."""
        super().__init__(num_blocks, layout)
        self._pool = pool
        self._queue: deque[Offer] = deque()

    def enqueue(self, offer: Offer) -> None:
        """At the end of the queue."""
        self._queue.append(offer)

    def ask(self, offer: Offer, give: Give) -> Granted | None:
        """Nothing: the queue gives the answer."""
        return None

    def next_in_queue(self) -> tuple[str, Granted] | None:
        """The oldest request, once its blocks are free."""
        if not self._queue:
            return None
        offer = self._queue[0]
        block_ids = self._pool.reserve("", offer.request_id, offer.num_blocks)
        if block_ids is None:
            return None
        self._queue.popleft()
        left = iter(block_ids)
        tables = [list(islice(left, len(blocks))) for blocks in offer.blocks]
        return offer.request_id, Granted(tables, self._first_tokens(offer))

    def free(self, request_id: str) -> None:
        """Give the blocks back to the pool, and the place in the queue up."""
        self._queue = deque(one for one in self._queue if one.request_id != request_id)
        self._pool.release("", request_id)


class SchedulerPlacement(Placement):
    """Blocks that an engine's scheduler chooses; they are its own all along."""

    def __init__(self, on_reserve: OnReserve, num_blocks: int, layout: KVLayout) -> None:
        """Ask ``on_reserve``."""
        super().__init__(num_blocks, layout)
        self._on_reserve = on_reserve

    def enqueue(self, offer: Offer) -> None:
        """Nothing: the scheduler has its own queue."""

    def ask(self, offer: Offer, give: Give) -> Granted | None:
        """Ask the scheduler, which may answer later."""
        answer = self._on_reserve(offer)
        if isinstance(answer, Deferred):
            return answer.bind(give)
        if not isinstance(answer, Granted | Refused):
            firsts = self._first_tokens(offer)
            answer = Granted(answer, firsts[0] if len(firsts) == 1 else firsts)
        taken = give(answer)
        return answer if isinstance(answer, Granted) and not taken else None

    def next_in_queue(self) -> tuple[str, Granted] | None:
        """Nobody: the scheduler gives the answers."""
        return None

    def free(self, request_id: str) -> None:
        """Nothing: the scheduler learns of the end by the notice, or by ``on_free``."""
