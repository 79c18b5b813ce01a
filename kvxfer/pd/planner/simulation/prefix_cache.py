"""KV of past prompts by hash, the least recently used first to go."""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    """Blocks of ``hash_tokens`` tokens; a hash stands for its block and all before it."""

    def __init__(self, hash_tokens: int, capacity_tokens: int | None = None) -> None:
        """Empty; ``capacity_tokens`` None: no limit but `shrink`'s."""
        self._hash_tokens = hash_tokens
        self._capacity_tokens = capacity_tokens
        self._blocks: OrderedDict[int, None] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Tokens that it holds."""
        return len(self._blocks) * self._hash_tokens

    def hit_tokens(self, hashes: Sequence[int]) -> int:
        """Tokens of the longest beginning that it holds."""
        count = 0
        for block in hashes:
            if block not in self._blocks:
                break
            count += 1
        return count * self._hash_tokens

    def insert(self, hashes: Sequence[int]) -> None:
        """Put a prompt in, or mark it as used; its end goes before its beginning."""
        blocks = self._blocks
        for block in reversed(hashes):
            if block in blocks:
                blocks.move_to_end(block)
            else:
                blocks[block] = None
        if self._capacity_tokens is not None:
            self.shrink(self._capacity_tokens)

    def shrink(self, most_tokens: int) -> None:
        """Drop blocks until no more than so many tokens are left."""
        most = max(0, most_tokens // self._hash_tokens)
        while len(self._blocks) > most:
            self._blocks.popitem(last=False)
