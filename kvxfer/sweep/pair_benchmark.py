"""A transfer of a pair under pytest-benchmark: every round another pattern, every byte checked.

Takes pytest-benchmark's fixture as an object and imports neither it nor pytest.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvxfer.errors import InvalidUsage
from kvxfer.layout import BlockIds, CopyPlan
from kvxfer.sweep.pair import Pair
from kvxfer.sweep.samples import require_possible
from kvxfer.sweep.stats import median
from kvxfer.transport import Transfer
from kvxfer.units import format_bytes, gb_per_s


@dataclass(frozen=True, slots=True)
class PairFigures:
    """What ``benchmark.extra_info`` holds; ``bench/README.md`` defines it.

    The rates are None where pytest-benchmark times nothing (``--benchmark-disable``).
    """

    gb_per_s: float | None
    limit_gb_per_s: float | None
    fraction_of_limit: float | None
    page_bytes: int
    total_bytes: int
    actual_path: str
    verified: bool

    def __str__(self) -> str:
        if self.gb_per_s is None or self.fraction_of_limit is None:
            return "not timed"
        return (
            f"{self.gb_per_s:.4g} GB/s, {self.fraction_of_limit:.0%} of the limit of "
            f"{self.limit_gb_per_s:.4g}, {format_bytes(self.total_bytes)} in pages of "
            f"{format_bytes(self.page_bytes)}, {self.actual_path}"
        )


class PairBenchmark:
    """Times :meth:`Pair.move`. What the fixture ``kvxfer_benchmark`` gives."""

    def __init__(
        self, benchmark: Any, on_figures: Callable[[PairFigures], None] = lambda _: None
    ) -> None:
        """Use pytest-benchmark's fixture ``benchmark``; tell ``on_figures`` of every figure."""
        self._benchmark = benchmark
        self._on_figures = on_figures

    def __call__(
        self,
        pair: Pair,
        src_ids: BlockIds,
        dst_ids: BlockIds,
        *,
        rounds: int = 20,
        warmup_rounds: int = 2,
    ) -> PairFigures:
        """Move ``src_ids`` to ``dst_ids`` once a round and check each round.

        Before the rounds the whole destination is checked (:meth:`Pair.prove`). Untimed, before
        every round: the last round is checked by the receiver, the contiguous copy of the limit is
        timed, and the request is planned, each copy of a source that was just written. One round
        is one transfer, from posting the plan to the data being visible to the receiver.

        Raises:
            VerificationError: a byte is wrong, or the figure is above the physical limit; the
                figure is dropped.
        """
        if len(src_ids) == 0:
            raise InvalidUsage("no blocks to move; give src_ids and dst_ids at least one id")
        pair.prove(src_ids, dst_ids)
        rounds_run = _Rounds(pair, src_ids, dst_ids)
        try:
            self._benchmark.pedantic(
                rounds_run.transfer,
                setup=rounds_run.prepare,
                rounds=rounds,
                warmup_rounds=warmup_rounds,
                iterations=1,
            )
            rounds_run.check()
            figures = self._figures(pair, rounds_run, warmup_rounds)
        except BaseException:
            # So that pytest-benchmark neither saves nor compares the figure.
            self._benchmark.has_error = True
            raise
        self._benchmark.extra_info.update(asdict(figures))
        self._on_figures(figures)
        return figures

    def _figures(self, pair: Pair, rounds: "_Rounds", warmup_rounds: int) -> PairFigures:
        total_bytes = rounds.total_bytes
        rate = limit = None
        if self._benchmark.enabled:
            stats = self._benchmark.stats.stats
            rate = gb_per_s(total_bytes, stats.median)
            limit = gb_per_s(total_bytes, median(rounds.limit_s[warmup_rounds:]))
            fastest = gb_per_s(total_bytes, stats.min)
            require_possible(fastest, limit, pair.physical_limit_gb_per_s)
        return PairFigures(
            gb_per_s=rate,
            limit_gb_per_s=limit,
            fraction_of_limit=None if rate is None or limit is None else rate / limit,
            page_bytes=pair.layout.page_bytes,
            total_bytes=total_bytes,
            actual_path=rounds.actual_path,
            verified=True,
        )


class _Rounds:
    """One round after the other of the same request."""

    def __init__(self, pair: Pair, src_ids: BlockIds, dst_ids: BlockIds) -> None:
        self._pair = pair
        self._src_ids = src_ids
        self._dst_ids = dst_ids
        self._seed: int | None = None
        self._transfer: Transfer | None = None
        self.total_bytes = pair.total_bytes(src_ids)
        self.limit_s: list[float] = []

    @property
    def actual_path(self) -> str:
        return "" if self._transfer is None else self._transfer.actual_path

    def prepare(self) -> tuple[tuple[CopyPlan], dict[str, Any]]:
        """All that comes before a transfer; its arguments."""
        self.check()
        self._pair.fill_prefix(self._pair.next_seed(), self.total_bytes)
        self.limit_s.append(self._pair.limit_copy(self.total_bytes))
        self._seed = self._pair.next_seed()
        self._pair.fill(self._seed, self._src_ids)
        plan = self._pair.plan(self._src_ids, self._dst_ids)
        self._pair.wake()
        return (plan,), {}

    def transfer(self, plan: CopyPlan) -> None:
        self._transfer = self._pair.move(plan)

    def check(self) -> None:
        """Check the last round, if there was one."""
        if self._seed is not None:
            self._pair.check(self._seed, self._src_ids, self._dst_ids)
