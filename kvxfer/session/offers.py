"""What a receiver and its engine say to each other about a request."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvxfer.errors import InvalidUsage
from kvxfer.layout import BlockIds


@dataclass(frozen=True, slots=True)
class Offer:
    """A sender wants to write a request here.

    Attributes:
        request_id: its name, which both engines know it by.
        tokens: the tokens that come.
        num_blocks: blocks of this cache that hold them; the first begins with token
            ``tokens.start`` rounded down to a whole block.
    """

    request_id: str
    tokens: range
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Granted:
    """Blocks for a request.

    Attributes:
        block_ids: integers ``[n]`` in the order of the tokens.
        first_token: the token in the first slot of the first block: more than the offer's where
            the engine has the beginning already.
    """

    block_ids: BlockIds
    first_token: int = 0


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

    def grant(self, block_ids: BlockIds, first_token: int = 0) -> bool:
        """Give the request blocks; False where it has ended meanwhile and did not take them.

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


Answer: TypeAlias = Granted | Refused | Deferred | Sequence[int]
OnReserve: TypeAlias = Callable[[Offer], "Answer | BlockIds"]


@dataclass(frozen=True, slots=True)
class Notice:
    """How a request ended: there is exactly one for each.

    Attributes:
        request_id: which.
        tokens: the tokens that were sent.
        block_ids: its blocks, in the order of the tokens; empty where it never got any.
        first_token: the token in the first slot of the first block.
        reason: why it failed; empty where it did not, and then its bytes are visible here.
        quarantined: a writer may still write to the blocks: use them only once ``on_free`` names
            the request. Only of a failed one whose writer neither ended nor answered.
    """

    request_id: str
    tokens: range
    block_ids: tuple[int, ...] = field(repr=False)
    first_token: int = 0
    reason: str = ""
    quarantined: bool = False

    @property
    def ok(self) -> bool:
        """Whether all of the request is here."""
        return not self.reason

    @property
    def failed_block_ids(self) -> tuple[int, ...]:
        """Blocks whose contents must not be used."""
        return () if self.ok else self.block_ids
