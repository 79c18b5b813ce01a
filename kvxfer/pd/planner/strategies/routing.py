"""Which engine a request goes to: in turn, to the least loaded, or to where its prefix lies.

KV-aware routing is Mooncake's: the engine with the fewest tokens to compute before the request's
first one, those queued there and those of its prompt that are not cached there (Qin et al., FAST
2025, section 5). Dedicated servers (TNG, "How Long Prompts Block Other Requests") are pools: long
prompts have engines of their own, and others never go there.
"""

from collections.abc import Callable, Sequence

from kvxfer.pd.planner.setup import Routing
from kvxfer.pd.planner.simulation.engine import Engine
from kvxfer.pd.planner.simulation.job import Job

Choice = Callable[[Sequence[Engine], Job], Engine]


class Router:
    """Chooses among engines.

    Args:
        engines: of one role.
        routing: how.
        num_long: of these, at the end, for long prompts alone.
    """

    def __init__(self, engines: Sequence[Engine], routing: Routing, num_long: int = 0) -> None:
        """No request was routed."""
        num_plain = len(engines) - num_long
        self._plain = engines[:num_plain]
        self._long = engines[num_plain:]
        self._turns = [0, 0]
        self._choose: Choice = {
            "round_robin": self._in_turn,
            "least_loaded": _least_loaded,
            "kv_aware": _kv_aware,
        }[routing]

    def pick(self, job: Job) -> Engine:
        """The engine for a job, which counts as assigned to it from now on."""
        pool = self._long if self._long and job.is_long else self._plain
        chosen = pool[0] if len(pool) == 1 else self._choose(pool, job)
        chosen.num_assigned += 1
        chosen.num_routed += 1
        return chosen

    def _in_turn(self, engines: Sequence[Engine], job: Job) -> Engine:
        turn = self._turns[engines is self._long]
        self._turns[engines is self._long] += 1
        return engines[turn % len(engines)]


def _least_loaded(engines: Sequence[Engine], job: Job) -> Engine:
    """The one with the fewest requests; where even, with the fewest so far."""
    return min(engines, key=lambda engine: (engine.num_assigned, engine.num_routed))


def _kv_aware(engines: Sequence[Engine], job: Job) -> Engine:
    """The one with the fewest tokens to compute first; where even, as `_least_loaded`."""
    return min(
        engines,
        key=lambda engine: (
            engine.pending_tokens + job.prompt - engine.memory.hit_tokens(job),
            engine.num_assigned,
            engine.num_routed,
        ),
    )
