"""What a scheduler tells its workers at an engine step. Plain data, which vLLM carries over."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvxfer.connectors.vllm.params import ReceiverAddress

# vLLM's block pool keeps this block for places that a request has no block for any more.
NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class Table:
    """Blocks of one request in one group of layers, as the scheduler numbers them.

    Attributes:
        block_ids: in the order of the tokens.
        first_token: the token in the first slot of the first block.
    """

    block_ids: tuple[int, ...]
    first_token: int

    @classmethod
    def covering(cls, blocks: Sequence[int], block_size: int, tokens: tuple[int, int]) -> "Table":
        """Those of a request's ``blocks`` that hold tokens ``tokens[0]`` to ``tokens[1] - 1``."""
        first, end = tokens[0] // block_size, -(-tokens[1] // block_size)
        return cls(tuple(blocks[first:end]), first * block_size)

    def without_left(self, block_size: int) -> "Table":
        """The same from the first block on that a sliding window has not left behind."""
        left = 0
        while left < len(self.block_ids) and self.block_ids[left] == NULL_BLOCK:
            left += 1
        return Table(self.block_ids[left:], self.first_token + left * block_size)


@dataclass(frozen=True, slots=True)
class Placement:
    """A decode request has blocks, or wants none.

    Attributes:
        request_id: vLLM's.
        transfer_id: what the prefill engine calls it.
        num_tokens: tokens that come: all of the prompt but the last.
        tables: one a group of layers; without blocks where everything is here already.
        awaited: the scheduler waits for the end.
    """

    request_id: str
    transfer_id: str
    num_tokens: int
    tables: tuple[Table, ...]
    awaited: bool


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A decode request has ended before its KV was there."""

    transfer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SendStart:
    """A prefill request is about to be computed; a later attempt replaces the one before.

    Attributes:
        request_id: vLLM's.
        transfer_id: what the decode engine calls it.
        attempt: number of this attempt, from 1.
        receivers: one a decode rank.
        num_tokens: tokens that will be sent.
    """

    request_id: str
    transfer_id: str
    attempt: int
    receivers: tuple[ReceiverAddress, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of a prefill request whose KV is there once this step has run.

    Attributes:
        request_id: vLLM's.
        tokens: first and end, of the whole prompt.
        tables: the blocks that hold them, one a group of layers.
        is_last: no more parts follow.
    """

    request_id: str
    tokens: tuple[int, int]
    tables: tuple[Table, ...]
    is_last: bool


@dataclass(slots=True)
class StepPlan:
    """All of it, for one step; in each list in the order in which it happened."""

    placements: list[Placement] = field(default_factory=list)
    given_up: list[GivenUp] = field(default_factory=list)
    starts: list[SendStart] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
