"""What a receiver and its engine say to each other about a request."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from kvxfer.errors import InvalidUsage
from kvxfer.layout import BlockIds, BlockTable


@dataclass(frozen=True, slots=True)
class Offer:
    """A sender wants to write a request here.

    Attributes:
        request_id: its name, which both engines know it by.
        tokens: the tokens that come.
        blocks: for each group of layers of this cache the blocks of the request that hold what the
            group needs of them; block ``i`` has slots from token ``i * block_size`` on.
    """

    request_id: str
    tokens: range
    blocks: tuple[range, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(map(len, self.blocks))


@dataclass(frozen=True, slots=True)
class Granted:
    """Blocks for a request, none of them twice.

    Attributes:
        block_ids: integers ``[n]`` in the order of the tokens; of a cache whose layers form groups
            a list of such, one for each group.
        first_token: the token in the first slot of the first block: more than the offer's where
            the engine has the beginning already. With a list of ids a list of these.
    """

    block_ids: BlockIds | Sequence[BlockIds]
    first_token: int | Sequence[int] = 0

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        """A table for each group.

        Raises:
            InvalidUsage: ids of another type or shape, a negative token, or two lists of unequal
                lengths.
        """
        if not isinstance(self.first_token, Sequence):
            return (BlockTable(cast(BlockIds, self.block_ids), self.first_token),)
        if len(self.block_ids) != len(self.first_token):
            raise InvalidUsage(
                f"{len(self.block_ids)} lists of block ids with {len(self.first_token)} first "
                "tokens; give one of each for every group of layers"
            )
        pairs = zip(cast(Sequence[BlockIds], self.block_ids), self.first_token, strict=True)
        return tuple(BlockTable(ids, first) for ids, first in pairs)


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine does not take a request."""

    reason: str


class Deferred:
    """An answer that the engine gives later, from any thread."""

    def __init__(self) -> None:
        """Not answered yet."""
        self._lock = threading.Lock()
        self._answer: Granted | Refused | None = None
        self._take: Callable[[Granted | Refused], bool] | None = None

    def grant(
        self, block_ids: BlockIds | Sequence[BlockIds], first_token: int | Sequence[int] = 0
    ) -> bool:
        """Give the request blocks; False where it has ended meanwhile and did not take them.

        For the arguments see `Granted`.

        Raises:
            InvalidUsage: it was answered before, or the blocks do not fit the offer.
        """
        return self._give(Granted(block_ids, first_token))

    def refuse(self, reason: str) -> bool:
        """Turn the request away; False where it has ended meanwhile.

        Raises:
            InvalidUsage: it was answered before.
        """
        return self._give(Refused(reason))

    def bind(self, take: Callable[[Granted | Refused], bool]) -> Granted | None:
        """Hand the answer to ``take``, at once if it was given already; for the receiver.

        Returns:
            A grant that was given already and came too late all the same.
        """
        with self._lock:
            self._take = take
            answer = self._answer
        if answer is None or take(answer) or isinstance(answer, Refused):
            return None
        return answer

    def _give(self, answer: Granted | Refused) -> bool:
        with self._lock:
            if self._answer is not None:
                raise InvalidUsage("a deferred reservation was answered before; answer it once")
            self._answer = answer
            take = self._take
        try:
            return True if take is None else take(answer)
        except InvalidUsage:
            self._answer = None  # blocks that do not fit: the scheduler may choose others
            raise


Answer: TypeAlias = Granted | Refused | Deferred | BlockIds | Sequence[BlockIds]
OnReserve: TypeAlias = Callable[[Offer], Answer]


def ids_of(tables: Iterable[BlockTable]) -> tuple[int, ...]:
    """The ids of several tables, one after another."""
    return tuple(one for table in tables for one in table.block_ids.tolist())


@dataclass(frozen=True, slots=True)
class Notice:
    """How a request ended: there is exactly one for each.

    Attributes:
        request_id: which.
        tokens: the tokens that were sent.
        tables: its blocks, a table for each group of layers; empty where it never got any.
        reason: why it failed; empty where it did not, and then its bytes are visible here.
        quarantined: a writer may still write to the blocks: use them only once ``on_free`` names
            the request. Only of a failed one whose writer neither ended nor answered.
    """

    request_id: str
    tokens: range
    tables: tuple[BlockTable, ...] = field(repr=False)
    reason: str = ""
    quarantined: bool = False

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The blocks of all groups, one group after another, each in the order of the tokens."""
        return ids_of(self.tables)

    @property
    def first_token(self) -> int:
        """The token in the first slot of the first block, of the first group."""
        return self.tables[0].first_token if self.tables else 0

    @property
    def ok(self) -> bool:
        """Whether all of the request is here."""
        return not self.reason

    @property
    def failed_block_ids(self) -> tuple[int, ...]:
        """Blocks whose contents must not be used."""
        return () if self.ok else self.block_ids
