"""How long the KV of a request takes to move, from measured sweeps (``kvxfer.sweep/1``).

Between measured points it interpolates; outside them it refuses, or says what it did.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Final

import msgspec

from kvxfer.errors import InvalidUsage
from kvxfer.sweep.result import SCHEMA, SweepReport, SweepResult
from kvxfer.units import format_bytes
from kvxfer.whole_file import read_bounded

MAX_SWEEP_BYTES = 64 << 20
KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "transport": "",
        "memory": " memory",
        "block_order": " blocks",
        "order": " pages",
    }
)
"""Fields in which the rows of a model are alike, and what their values are of."""
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
        """Seconds of one transfer alone: straight between sizes, at the last one's rate beyond.

        Below the smallest it is the smallest one's time: what is small takes mostly the time to
        begin, and not in proportion less.
        """
        sizes, times = self.sizes_bytes, self.times_s
        if num_bytes <= sizes[0]:
            return times[0]
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
        rows: verified rows of a sweep, of one direction and number of SMs and alike in `KINDS`.
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
    op: str = "put",
    sm_count: int | None = None,
    only: Mapping[str, str] = MappingProxyType({}),
    control_s: float = 0.0,
    contention: Sequence[tuple[int, float]] = (),
    strict: bool = False,
) -> TransferModel:
    """Read the records that ``kvxfer sweep --json`` wrote.

    Rows of peers, of conversions between dtypes, beside a compute load, or with wrong bytes are
    left out.

    Args:
        op: ``put`` or ``get``.
        sm_count: None: the fewest SMs that were measured.
        only: values of fields of `KINDS`; of one that is not named, all rows have one.
        control_s, contention, strict: as `TransferModel`.

    Raises:
        InvalidUsage: a file cannot be read or is of another schema, a row is impossible, no row is
            left, or there are several transports (or memories, and so on) and none is named.
    """
    source = ", ".join(path.name for path in paths)
    rows = [row for path in paths for row in _rows(path, op)]
    if not rows:
        raise InvalidUsage(f"{source}: no verified {op} at all; sweep with --op {op}")
    for field in KINDS:
        rows = _alike(source, rows, field, only.get(field))
    fewest = min(row.sm_count for row in rows) if sm_count is None else sm_count
    rows = [row for row in rows if row.sm_count == fewest]
    if not rows:
        raise InvalidUsage(f"{source}: no row with {fewest} SMs; leave it out for the fewest")
    return TransferModel(source, tuple(rows), control_s, tuple(contention), strict)


def _alike(
    source: str, rows: list[SweepResult], field: str, wanted: str | None
) -> list[SweepResult]:
    """The rows with that value of a field; None: the one of all rows, where there is but one."""
    values = sorted({str(getattr(row, field)) for row in rows})
    if wanted is None:
        if len(values) > 1:
            raise InvalidUsage(
                f"{source}: the sweep has rows of {', '.join(values)}{KINDS[field]}; name one "
                f"(--{field.replace('_', '-')}), or sweep one alone"
            )
        return rows
    if wanted not in values:
        raise InvalidUsage(
            f"{source}: no verified {rows[0].op} of {wanted}{KINDS[field]}; it has "
            f"{', '.join(values)}"
        )
    return [row for row in rows if str(getattr(row, field)) == wanted]


def _rows(path: Path, op: str) -> Iterator[SweepResult]:
    """Rows of a file that count, each of them possible."""
    for number, row in enumerate(_read(path).results, 1):
        if not _counts(row, op):
            continue
        for name, value in (
            ("total_bytes", row.total_bytes),
            ("run_bytes", _run_bytes(row)),
            ("latency_us.p50", row.latency_us.p50),
        ):
            if not value > 0:
                raise InvalidUsage(
                    f"{path}, row {number} ({row.transport}, {row.memory} memory): {name} is "
                    f"{value}, and of a transfer it is above 0; sweep again"
                )
        yield row


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
    return row.verified and plain and row.op == op


def _run_bytes(row: SweepResult) -> int:
    return row.page_bytes if row.run_bytes is None else row.run_bytes


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
