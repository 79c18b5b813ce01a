"""How long the KV of a request takes to move, from measured sweeps (``kvxfer.sweep/1``).

Between measured points it interpolates; outside them it refuses, or says what it did.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

from kvxfer.errors import InvalidUsage
from kvxfer.sweep.result import SCHEMA, SweepReport, SweepResult
from kvxfer.units import format_bytes
from kvxfer.whole_file import read_bounded

MAX_SWEEP_BYTES = 64 << 20
_Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Curve:
    """Times of one kind of transfer over its bytes.

    Args:
        sizes_bytes: measured, ascending.
        times_s: of one transfer of each size alone.
        reasons: what was taken from outside the measurements for it; empty where nothing was.
    """

    sizes_bytes: tuple[int, ...]
    times_s: tuple[float, ...]
    reasons: tuple[str, ...] = ()

    def alone_s(self, num_bytes: float) -> float:
        """Seconds of one transfer alone: straight between sizes, at the outermost rate beyond."""
        sizes, times = self.sizes_bytes, self.times_s
        if num_bytes <= sizes[0]:
            return times[0] * num_bytes / sizes[0]
        for low in range(len(sizes) - 1):
            if num_bytes <= sizes[low + 1]:
                part = (num_bytes - sizes[low]) / (sizes[low + 1] - sizes[low])
                return times[low] + part * (times[low + 1] - times[low])
        return times[-1] * num_bytes / sizes[-1]

    def covers(self, num_bytes: float) -> bool:
        """Whether so many bytes lie between measured sizes."""
        return self.sizes_bytes[0] <= num_bytes <= self.sizes_bytes[-1]


@dataclass(frozen=True, slots=True)
class TransferModel:
    """Measured transfers of one path in one direction.

    Args:
        source: where the figures come from.
        rows: verified rows of a sweep, of one transport, direction and number of SMs.
        control_s: what a hand-over takes besides copying: reserve, notify, poll, schedule.
        contention: points (transfers at once over one link, GB/s of all together by GB/s of one
            alone), ascending. More than the last, and without points, gain nothing together.
        strict: refuse what lies outside the measurements, instead of saying so.
    """

    source: str
    rows: tuple[SweepResult, ...]
    control_s: float = 0.0
    contention: tuple[tuple[int, float], ...] = ()
    strict: bool = False

    def __post_init__(self) -> None:
        if not self.rows:
            raise InvalidUsage(f"{self.source} has no transfer to go by; measure some")
        if not 0.0 <= self.control_s < 1e3:
            raise InvalidUsage(f"control_s is {self.control_s}; use seconds from 0 to 1000")
        counts = [0, *(count for count, _ in self.contention)]
        rising = all(low < high for low, high in pairwise(counts))
        if not rising or any(not 0.0 < gain < 1e3 for _, gain in self.contention):
            raise InvalidUsage(
                f"contention is {self.contention}; use ascending counts and rates above zero"
            )

    def curve(self, *, run_bytes: int, src_tp: int = 1, dst_tp: int = 1) -> Curve:
        """The times for runs of that size between so many ranks.

        Rates of neighbouring run sizes are interpolated over the logarithm of the size. Ranks that
        were not measured are taken for those of one rank on each side, which says nothing of their
        links: that is a reason of the curve.

        Args:
            run_bytes: contiguous bytes that one copy on the way moves.
            src_tp, dst_tp: ranks on each side; times are of all of them together.

        Raises:
            InvalidUsage: ``strict``, and the runs or ranks lie outside the measurements.
        """
        rows, ranks_reason = self._of_ranks((src_tp, dst_tp))
        by_run: dict[int, list[SweepResult]] = {}
        for row in rows:
            by_run.setdefault(_run_bytes(row), []).append(row)
        low, high, runs_reason = _neighbours(sorted(by_run), run_bytes)
        reasons = tuple(reason for reason in (ranks_reason, runs_reason) if reason)
        if reasons and self.strict:
            raise InvalidUsage(f"{'; '.join(reasons)}; sweep there, or let it extrapolate")
        part = 0.0 if high == low else math.log(run_bytes / low) / math.log(high / low)
        return _blend(_curve(by_run[low]), _curve(by_run[high]), part, reasons)

    def share(self, num_transfers: int) -> float:
        """Rate of each of so many transfers over one link, by the rate of one alone."""
        if num_transfers <= 1:
            return 1.0
        return self._together(num_transfers) / num_transfers

    def covers(self, num_transfers: int) -> bool:
        """Whether so many at once were measured."""
        return num_transfers <= max((count for count, _ in self.contention), default=1)

    def _together(self, num_transfers: int) -> float:
        low = (1, 1.0)
        for count, gain in self.contention:
            if num_transfers <= count:
                part = (num_transfers - low[0]) / max(1, count - low[0])
                return low[1] + part * (gain - low[1])
            low = (count, gain)
        return low[1]

    def _of_ranks(self, wanted: _Pair) -> tuple[list[SweepResult], str]:
        rows = [row for row in self.rows if (row.src_tp, row.dst_tp) == wanted]
        if rows:
            return rows, ""
        single = [row for row in self.rows if (row.src_tp, row.dst_tp) == (1, 1)]
        known = sorted({(row.src_tp, row.dst_tp) for row in self.rows})
        text = ", ".join(f"{src}:{dst}" for src, dst in known)
        if not single:
            raise InvalidUsage(
                f"no transfer of TP {wanted[0]}:{wanted[1]} among {text}; sweep it with --tp"
            )
        reason = f"transfers of TP {wanted[0]}:{wanted[1]} taken as 1:1; measured: {text}"
        return single, reason


def load_transfer(
    paths: Sequence[Path],
    *,
    transport: str | None = None,
    op: str = "put",
    sm_count: int | None = None,
    control_s: float = 0.0,
    contention: Sequence[tuple[int, float]] = (),
    strict: bool = False,
) -> TransferModel:
    """Read the records that ``kvxfer sweep --json`` wrote.

    Rows of peers, of conversions between dtypes, beside a compute load, or with wrong bytes are
    left out.

    Args:
        transport: of the rows to take; None: the one of all rows, where there is but one.
        op: ``put`` or ``get``.
        sm_count: None: the fewest SMs that were measured.
        control_s, contention, strict: as `TransferModel`.

    Raises:
        InvalidUsage: a file cannot be read or is of another schema, no row is left, or there are
            several transports and none is named.
    """
    rows = [row for path in paths for row in _read(path).results if _counts(row, op)]
    transports = sorted({row.transport for row in rows})
    if transport is None and len(transports) > 1:
        raise InvalidUsage(f"the sweep has rows of {', '.join(transports)}; name one")
    rows = [row for row in rows if transport in (None, row.transport)]
    source = ", ".join(path.name for path in paths)
    if not rows:
        raise InvalidUsage(
            f"{source}: no verified {op} of {transport or 'any transport'}; "
            f"it has {', '.join(transports) or 'none at all'}"
        )
    fewest = min(row.sm_count for row in rows) if sm_count is None else sm_count
    rows = [row for row in rows if row.sm_count == fewest]
    if not rows:
        raise InvalidUsage(f"{source}: no row with {fewest} SMs; leave it out for the fewest")
    return TransferModel(source, tuple(rows), control_s, tuple(contention), strict)


def _read(path: Path) -> SweepReport:
    try:
        report = msgspec.json.decode(read_bounded(path, MAX_SWEEP_BYTES), type=SweepReport)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidUsage(f"{path} is not a record of a sweep: {error}") from error
    if report.schema != SCHEMA:
        raise InvalidUsage(f"{path} has the schema {report.schema!r}; use a record of {SCHEMA}")
    return report


def _counts(row: SweepResult, op: str) -> bool:
    plain = not row.peer and not row.convert and row.compute is None
    return row.verified and plain and row.op == op and row.latency_us.p50 > 0.0


def _run_bytes(row: SweepResult) -> int:
    return row.run_bytes or row.page_bytes


def _neighbours(sizes: list[int], wanted: int) -> tuple[int, int, str]:
    """The measured sizes on either side, and why where there is none on one."""
    if not sizes[0] <= wanted <= sizes[-1]:
        nearest = sizes[0] if wanted < sizes[0] else sizes[-1]
        measured = f"{format_bytes(sizes[0])} to {format_bytes(sizes[-1])}"
        reason = (
            f"runs of {format_bytes(wanted)} taken as {format_bytes(nearest)}; measured: {measured}"
        )
        return nearest, nearest, reason
    low = max(size for size in sizes if size <= wanted)
    return low, min(size for size in sizes if size >= wanted), ""


def _curve(rows: list[SweepResult]) -> Curve:
    by_size: dict[int, list[float]] = {}
    for row in rows:
        by_size.setdefault(row.total_bytes, []).append(row.latency_us.p50 * 1e-6)
    sizes = tuple(sorted(by_size))
    return Curve(sizes, tuple(median(by_size[size]) for size in sizes))


def _blend(low: Curve, high: Curve, part: float, reasons: tuple[str, ...]) -> Curve:
    """Between two curves; sizes are those that both cover, or of the nearer one where none are."""
    sizes = {*low.sizes_bytes, *high.sizes_bytes}
    shared = sorted(size for size in sizes if low.covers(size) and high.covers(size))
    if not shared:
        nearer = low if part < 0.5 else high
        return Curve(nearer.sizes_bytes, nearer.times_s, reasons)
    times = (
        low.alone_s(size) * (high.alone_s(size) / low.alone_s(size)) ** part for size in shared
    )
    return Curve(tuple(shared), tuple(times), reasons)
