"""What a caller hands over of a request, part by part: each token of a layer once."""

from collections.abc import Collection
from dataclasses import dataclass

from kvxfer.errors import InvalidUsage
from kvxfer.layout import MAX_NUM_TOKENS, Blocks, BlockTable, BlockTables, KVShard, as_tables
from kvxfer.transport import StreamMark


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of some layers whose bytes are in their blocks here, or will be.

    Attributes:
        blocks: a block table, or one for each group of layers.
        tokens: which tokens of the request.
        layers: numbered as in the whole model; None = all of this rank.
        after: what is reached before the blocks are read; None = they may be read at once.
    """

    blocks: BlockTable | BlockTables
    tokens: range
    layers: frozenset[int] | None
    after: StreamMark | None


class Parts:
    """The parts of one request, in the order in which they came. Not thread-safe.

    Attributes:
        tokens: which tokens of the request are sent.
        parts: those that came.
    """

    def __init__(self, request_id: str, shard: KVShard, tokens: range) -> None:
        """None yet, of ``tokens`` of the layers of ``shard``.

        Raises:
            InvalidUsage: tokens that are no range of step 1 within 0 to `MAX_NUM_TOKENS`.
        """
        if tokens.step != 1 or not 0 <= tokens.start <= tokens.stop <= MAX_NUM_TOKENS:
            raise InvalidUsage(
                f"tokens {tokens} of request {request_id!r}; use a range of step 1, from 0 on, "
                f"that ends at {MAX_NUM_TOKENS} or before"
            )
        self._what = f"request {request_id!r}"
        self._shard = shard
        self.tokens = tokens
        self._had: dict[int, list[range]] = {layer: [] for layer in shard.layers}
        self.parts: list[Part] = []

    def add(
        self,
        blocks: Blocks,
        tokens: range | None,
        layers: Collection[int] | None,
        after: StreamMark | None,
    ) -> None:
        """Add a part, or nothing of it.

        Raises:
            InvalidUsage: tokens or layers that are not of the request, tables that do not hold
                them, or what another part has already.
        """
        tokens = self.tokens if tokens is None else tokens
        self._require_tokens(tokens)
        chosen = self._chosen(layers)
        if not isinstance(blocks, BlockTable | BlockTables):
            blocks = BlockTable(blocks)
        self._require_held(blocks, tokens, self._had if chosen is None else chosen)
        self._take(tokens, self._had if chosen is None else chosen)
        self.parts.append(Part(blocks, tokens, chosen, after))

    def gap(self) -> str:
        """What no part has of what the layers need; empty where they have all."""
        for layer, had in self._had.items():
            needed = self._shard.model.needed_by(layer, self.tokens)
            start = needed.start
            for one in had:
                start = one.stop if one.start <= start < one.stop else start
            if start < needed.stop:
                return f"token {start} of layer {layer}"
        return ""

    def _require_tokens(self, tokens: range) -> None:
        within = self.tokens.start <= tokens.start <= tokens.stop <= self.tokens.stop
        if tokens.step != 1 or not within:
            raise InvalidUsage(
                f"tokens {tokens} of {self._what}, which is {self.tokens}; push tokens of it"
            )

    def _chosen(self, layers: Collection[int] | None) -> frozenset[int] | None:
        if layers is None:
            return None
        chosen = frozenset(layers)
        if not chosen <= self._had.keys():
            own = self._shard.layers
            raise InvalidUsage(
                f"layers {sorted(chosen - self._had.keys())} of {self._what}; this rank holds "
                f"{own.start} to {own.stop - 1}"
            )
        return chosen

    def _require_held(
        self, blocks: BlockTable | BlockTables, tokens: range, layers: Collection[int]
    ) -> None:
        model, tables = self._shard.model, as_tables(blocks)
        if len(tables) != model.num_groups:
            raise InvalidUsage(
                f"{len(tables)} block tables for {self._what}; the layers form "
                f"{model.num_groups} groups, so give one for each"
            )
        held = [table.tokens(model.block_size) for table in tables]
        for layer in layers:
            has = held[model.group_of(layer)]
            needed = model.needed_by(layer, self.tokens)
            first = max(tokens.start, needed.start)
            if first < tokens.stop and not has.start <= first < tokens.stop <= has.stop:
                raise InvalidUsage(
                    f"tokens {first} to {tokens.stop - 1} of layer {layer} of {self._what} are not "
                    f"within {has}, which the blocks hold"
                )

    def _take(self, tokens: range, layers: Collection[int]) -> None:
        """Note that ``layers`` have ``tokens``; of all of them or, where one has some, of none."""
        if not tokens:
            return
        for layer in layers:
            for one in self._had[layer]:
                if one.start < tokens.stop and tokens.start < one.stop:
                    raise InvalidUsage(
                        f"tokens {one.start} to {one.stop - 1} of layer {layer} of {self._what} "
                        f"were sent before, and now {tokens.start} to {tokens.stop - 1}; send each "
                        "token of a layer once"
                    )
        for layer in layers:
            _insert(self._had[layer], tokens)


def _insert(ranges: list[range], new: range) -> None:
    """Put ``new`` among ascending ranges that do not touch each other or it overlaps with."""
    if ranges and ranges[-1].stop == new.start:  # tokens come in their order
        ranges[-1] = range(ranges[-1].start, new.stop)
        return
    ranges.append(new)
    ranges.sort(key=lambda one: one.start)
    for index in range(len(ranges) - 1, 0, -1):
        if ranges[index - 1].stop == ranges[index].start:
            ranges[index - 1] = range(ranges[index - 1].start, ranges.pop(index).stop)
