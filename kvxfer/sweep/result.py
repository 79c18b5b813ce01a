"""The result of a sweep: schema ``kvxfer.sweep/1``.

``bench/README.md`` defines every number. Fields are only ever added within version 1.
"""

import msgspec

from kvxfer.tuning import Slots

SCHEMA = "kvxfer.sweep/1"


class Rate(msgspec.Struct, frozen=True):
    """GB/s (1e9 bytes a second) over the iterations: bytes of the request / latency.

    Beside a compute load all three are one figure: bytes of all transfers / wall time of them all.
    """

    p50: float
    min: float
    max: float


class Latency(msgspec.Struct, frozen=True):
    """Microseconds from posting a plan to the bytes being visible; ``plan_us`` comes before."""

    p50: float
    p90: float
    p99: float


class Median(msgspec.Struct, frozen=True):
    """A median alone."""

    p50: float


class ComputeEffect(msgspec.Struct, frozen=True):
    """A compute load beside the transfers: its operation's median time without and with them."""

    kind: str
    side: str
    alone_us: float
    beside_us: float

    @property
    def slowdown(self) -> float:
        """0.03 = 3 % slower beside the transfers."""
        return self.beside_us / self.alone_us - 1.0


class SweepResult(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a sweep."""

    transport: str
    model: str
    num_tokens: int
    block_size: int
    page_bytes: int
    num_pages: int
    total_bytes: int
    src_tp: int
    dst_tp: int
    order: str
    block_order: str
    sm_count: int
    num_threads: int
    iters: int
    gb_per_s: Rate
    latency_us: Latency
    limit_gb_per_s: float
    fraction_of_limit: float
    plan_us: Median
    post_us: Median
    verified: bool
    actual_path: str
    notes: list[str]
    op: str
    memory: str
    dtype: str
    physical_limit_gb_per_s: float | None = None
    compute: ComputeEffect | None = None
    sm_budget: str = ""
    num_kv_heads: int | None = None
    src_layout: str = ""
    dst_layout: str = ""
    src_pp: int = 1
    dst_pp: int = 1
    convert: str = ""
    run_bytes: int | None = None
    num_runs: int | None = None
    rank_spread: float | None = None
    peer: str = ""
    settings: str = ""
    slots: Slots | None = None

    @property
    def of_ranks(self) -> bool:
        """Whether each side was one process a rank."""
        return self.num_runs is not None


class Skipped(msgspec.Struct, frozen=True):
    """A case that could not be measured here, and why; ``failed`` where that is an error."""

    case: str
    reason: str
    failed: bool
    src_layout: str = ""
    dst_layout: str = ""


class SweepReport(msgspec.Struct, kw_only=True):
    """A whole sweep, as ``--json`` writes it."""

    schema: str
    environment: dict[str, str]
    results: list[SweepResult]
    skipped: list[Skipped] = []
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        """Whether a check failed: wrong bytes, an impossible figure, a silent fall-back."""
        return any(not row.verified for row in self.results) or any(
            row.failed for row in self.skipped
        )
