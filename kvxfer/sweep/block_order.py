"""Block tables as engines hand them out."""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidUsage

_FORM = re.compile(r"shuffled|contiguous|fragmented:([1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """How the ids of a request lie in the pool.

    ``shuffled``: a random subset in random order, the state of a pool after much churn.
    ``contiguous``: one run of ids. ``fragmented:R``: runs of R neighbouring ids, the runs shuffled.

    Attributes:
        text: the form on the command line.
        run_blocks: ids in a run; 0 = one run.
    """

    text: str
    run_blocks: int

    @classmethod
    def parse(cls, text: str) -> "BlockOrder":
        """Read ``shuffled``, ``contiguous`` or ``fragmented:R``.

        Raises:
            InvalidUsage: another word, or R missing, zero or where it has no meaning.
        """
        match = _FORM.fullmatch(text.strip().lower())
        if match is None:
            raise InvalidUsage(
                f"block order {text!r}; use shuffled, contiguous or fragmented:R (R ids in a run)"
            )
        if match[1]:
            return cls(match[0], int(match[1]))
        return cls(match[0], 1 if match[0] == "shuffled" else 0)

    def draw(self, count: int, pool: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """``count`` different ids of a pool of ``pool`` blocks, int64 ``[count]``.

        Raises:
            InvalidUsage: the pool is smaller than ``count`` rounded up to whole runs.
        """
        run = self.run_blocks or count
        num_runs = -(-count // run) if count else 0
        if num_runs * run > pool:
            raise InvalidUsage(f"{num_runs} runs of {run} blocks do not fit a pool of {pool}")
        if self.run_blocks == 0:
            return np.arange(count, dtype=np.int64)
        starts = rng.permutation(pool // run)[:num_runs].astype(np.int64) * run
        return (starts[:, None] + np.arange(run, dtype=np.int64)).reshape(-1)[:count]
