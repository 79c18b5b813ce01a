"""Which answers a channel still owes, bounded for each caller and in all."""

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass

from kvxfer.control.deferred import DeferredReply
from kvxfer.errors import NotAvailable

MAX_PENDING = 4096
MAX_PENDING_OF_A_CALLER = 64


@dataclass(frozen=True, slots=True)
class Owed:
    """An answer, to whom, and until when."""

    routing_id: bytes
    call_id: bytes
    deferred: DeferredReply
    end_s: float


class Pending:
    """All answers that are owed, by ticket; used by the server's thread alone."""

    def __init__(self) -> None:
        """None yet."""
        self._tickets = itertools.count()
        self._owed: dict[int, Owed] = {}
        self._of_caller: Counter[bytes] = Counter()
        self._ends: list[tuple[float, int]] = []  # a heap; tickets that were taken are skipped

    def __len__(self) -> int:
        return len(self._owed)

    def add(self, owed: Owed) -> int:
        """Keep ``owed``; returns its ticket.

        Raises:
            NotAvailable: as many are owed as may be, to this caller or in all.
        """
        if self._of_caller[owed.routing_id] >= MAX_PENDING_OF_A_CALLER:
            raise NotAvailable(
                f"{MAX_PENDING_OF_A_CALLER} answers are owed to this caller already, which is the "
                f"limit; wait for some of them"
            )
        if len(self._owed) >= MAX_PENDING:
            raise NotAvailable(
                f"{MAX_PENDING} answers are owed already, which is the limit; call again later"
            )
        ticket = next(self._tickets)
        self._owed[ticket] = owed
        self._of_caller[owed.routing_id] += 1
        heapq.heappush(self._ends, (owed.end_s, ticket))
        if len(self._ends) > 2 * len(self._owed) + MAX_PENDING_OF_A_CALLER:
            self._ends = [(one.end_s, key) for key, one in self._owed.items()]
            heapq.heapify(self._ends)
        return ticket

    def take(self, ticket: int) -> Owed | None:
        """Owe it no more; None where that is so already."""
        owed = self._owed.pop(ticket, None)
        if owed is not None:
            self._of_caller[owed.routing_id] -= 1
            if not self._of_caller[owed.routing_id]:
                del self._of_caller[owed.routing_id]
        return owed

    @property
    def next_end_s(self) -> float:
        """When the next of them is too late; infinity for none."""
        while self._ends and self._ends[0][1] not in self._owed:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else float("inf")

    def take_late(self, now_s: float) -> list[Owed]:
        """Those whose callers have stopped waiting."""
        late = []
        while self.next_end_s <= now_s:
            owed = self.take(heapq.heappop(self._ends)[1])
            if owed is not None:
                late.append(owed)
        return late

    def take_of(self, routing_id: bytes) -> list[Owed]:
        """Those of one caller."""
        if routing_id not in self._of_caller:
            return []
        tickets = [key for key, one in self._owed.items() if one.routing_id == routing_id]
        return [owed for ticket in tickets if (owed := self.take(ticket)) is not None]

    def take_all(self) -> list[Owed]:
        """Every one."""
        return [owed for ticket in list(self._owed) if (owed := self.take(ticket)) is not None]
