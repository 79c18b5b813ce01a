"""A remote KV store: prompts that any engine computed, loaded over a link that all share.

A load brings what the store has beyond the engine's own cache, before the prompt's prefill starts;
writing to the store takes no time. Source of the technique: Mooncake Store (Qin et al., FAST 2025).
"""

from collections.abc import Callable

from kvxfer.pd.planner.setup import RemoteStore
from kvxfer.pd.planner.simulation.clock import Clock
from kvxfer.pd.planner.simulation.job import Job
from kvxfer.pd.planner.simulation.links import Links
from kvxfer.pd.planner.simulation.prefix_cache import PrefixCache

_LINK = ("store",)


class Store:
    """The store of one simulation.

    Args:
        clock: the simulation's.
        spec: bandwidth, latency and capacity.
        bytes_per_token: of the KV.
        hash_tokens: of the trace.
    """

    def __init__(
        self, clock: Clock, spec: RemoteStore, bytes_per_token: int, hash_tokens: int
    ) -> None:
        """Empty."""
        self._clock = clock
        self._spec = spec
        self._token_s = bytes_per_token / (spec.gb_per_s * 1e9)
        self._links = Links(clock, lambda count: 1.0 / count)
        self._cache = PrefixCache(hash_tokens, spec.capacity_tokens)

    def insert(self, job: Job) -> None:
        """Keep a prompt that was computed."""
        self._cache.insert(job.request.prefix_hashes)

    def hit_tokens(self, job: Job) -> int:
        """Tokens of a job's prompt that need not be computed; one always has to be."""
        return min(self._cache.hit_tokens(job.request.prefix_hashes), job.prompt - 1)

    def load(self, num_tokens: int, done: Callable[[], None]) -> None:
        """Bring so many tokens; ``done`` is called when they are there."""
        work_s = num_tokens * self._token_s
        begins_s = self._clock.now_s + self._spec.latency_s
        self._clock.at(begins_s, self._links.start, work_s, _LINK, done)
