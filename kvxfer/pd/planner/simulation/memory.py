"""The KV memory of one engine: what running requests hold, and what is left of others.

A request holds its prompt and its tokens so far, and one block more, so that a block that is not
full is never counted short. A prefix that several share, or that the cache holds too, is counted
for each: never too little, sometimes too much.
"""

from kvxfer.errors import InvalidUsage
from kvxfer.pd.planner.simulation.job import Job
from kvxfer.pd.planner.simulation.prefix_cache import PrefixCache


class KVMemory:
    """Tokens of KV.

    Args:
        capacity_tokens: None: without limit.
        block_tokens: of one block.
        cache: of the KV of past prompts, or none.
    """

    def __init__(
        self, capacity_tokens: int | None, block_tokens: int, cache: PrefixCache | None
    ) -> None:
        """Nothing is held."""
        self.capacity_tokens = capacity_tokens
        self.cache = cache
        self.used_tokens = 0
        self.peak_tokens = 0
        self._block_tokens = block_tokens

    def check(self, job: Job, num_tokens: int) -> None:
        """Refuse a request that could never end.

        Raises:
            InvalidUsage: so many tokens do not fit an empty memory.
        """
        needed = num_tokens + self._block_tokens
        if self.capacity_tokens is not None and needed > self.capacity_tokens:
            raise InvalidUsage(
                f"request {job.index} needs {needed} tokens of KV, and an engine has "
                f"{self.capacity_tokens}; use more GPUs an engine, or fp8"
            )

    def fits(self, job: Job, num_growing: int) -> bool:
        """Whether a job's prompt fits, with a token for each that decodes."""
        needed = job.prompt + self._block_tokens + num_growing + 1
        return self.capacity_tokens is None or self.used_tokens + needed <= self.capacity_tokens

    def hold(self, job: Job) -> None:
        """Take the memory of a job's prompt."""
        job.held = job.prompt + self._block_tokens
        self.grow(job.held)

    def grow(self, num_tokens: int) -> None:
        """Running requests hold so many more; old KV makes room."""
        self.used_tokens += num_tokens
        self.peak_tokens = max(self.peak_tokens, self.used_tokens)
        if self.cache is not None and self.capacity_tokens is not None:
            left = self.capacity_tokens - self.used_tokens
            if self.cache.num_tokens > left:
                self.cache.shrink(left)

    def release(self, num_tokens: int) -> None:
        """Give tokens back."""
        self.used_tokens -= num_tokens

    def free_tokens(self) -> int | None:
        """What running requests may still take; None: without limit."""
        return None if self.capacity_tokens is None else self.capacity_tokens - self.used_tokens

    def remember(self, job: Job) -> None:
        """Keep a computed prompt for others, as far as there is room."""
        if self.cache is not None:
            self.cache.insert(job.request.prefix_hashes)
            self.grow(0)

    def hit_tokens(self, job: Job) -> int:
        """Tokens of a job's prompt that need not be computed; one always has to be."""
        if self.cache is None:
            return 0
        return min(self.cache.hit_tokens(job.request.prefix_hashes), job.prompt - 1)
