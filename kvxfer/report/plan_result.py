"""Who sends what to whom, as figures: what ``kvxfer plan`` prints and writes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

PLAN_SCHEMA: Final = "kvxfer.plan/1"


@dataclass(frozen=True, slots=True)
class Part:
    """Layers times heads, as the model numbers them."""

    layers: range
    heads: range


@dataclass(frozen=True, slots=True)
class RankPart:
    """One rank and the part of the cache that it holds."""

    pp_rank: int
    tp_rank: int
    held: Part


@dataclass(frozen=True, slots=True, kw_only=True)
class SideParts:
    """One side: its specification and its ranks, those of the first stage first."""

    spec: str
    tp: int
    pp: int
    ranks: tuple[RankPart, ...]

    def name(self, rank: int) -> str:
        """How people call rank number ``rank``."""
        one = self.ranks[rank]
        return f"pp{one.pp_rank} tp{one.tp_rank}" if self.pp > 1 else str(one.tp_rank)

    def stages(self) -> tuple[range, ...]:
        """The layers of each pipeline stage."""
        return tuple(rank.held.layers for rank in self.ranks[:: self.tp])


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """What one source rank sends to one destination rank.

    Args:
        src: number of the source's rank.
        dst: number of the destination's rank.
        parts: what is sent.
        num_bytes: bytes written.
        num_runs: contiguous runs.
        run_bytes: sizes of the runs as they are read, shortest first.
        num_pages: pages, each the part of a plane that one segment covers.
        num_boxes: boxes of the plan.
        table_bytes: bytes of the plan's tables.
    """

    src: int
    dst: int
    parts: tuple[Part, ...]
    num_bytes: int
    num_runs: int
    run_bytes: tuple[int, ...]
    num_pages: int
    num_boxes: int
    table_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The plans of all pairs of ranks for one request.

    Args:
        model: name of the model.
        num_layers: layers of the model.
        num_kv_heads: KV heads a layer.
        latent: whether the one head is the latent of MLA.
        num_sliding: layers that move only their window.
        window: the longest window in tokens; 0 = none.
        tokens: which tokens of the request move.
        converts: whether elements become fp8 on the way.
        src: the side that is read.
        dst: the side that is written.
        pairs: one for each pair of ranks that has something to move.
        route_us: to work out, for each source rank, what goes to whom; once for all requests.
        plan_us: for each source rank, to match the block tables and plan one request (median).
    """

    model: str
    num_layers: int
    num_kv_heads: int
    latent: bool
    num_sliding: int
    window: int
    tokens: range
    converts: bool
    src: SideParts
    dst: SideParts
    pairs: tuple[PairPlan, ...]
    route_us: tuple[float, ...]
    plan_us: tuple[float, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes written by all pairs."""
        return sum(pair.num_bytes for pair in self.pairs)

    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes that each source rank sends, as they are written."""
        return _sums(self.src, ((pair.src, pair.num_bytes) for pair in self.pairs))

    def received_bytes(self) -> tuple[int, ...]:
        """Bytes that each destination rank receives."""
        return _sums(self.dst, ((pair.dst, pair.num_bytes) for pair in self.pairs))

    def table_bytes(self) -> tuple[int, ...]:
        """Bytes of the tables of each source rank's plans."""
        return _sums(self.src, ((pair.src, pair.table_bytes) for pair in self.pairs))


def said(one: range) -> str:
    """``0–7``, or ``3`` for one number."""
    return f"{one.start}–{one.stop - 1}" if len(one) > 1 else str(one.start)


def document(report: PlanReport) -> dict[str, Any]:
    """The report for JSON, schema `PLAN_SCHEMA`; ranges become [first, end)."""
    sent, tables = report.sent_bytes(), report.table_bytes()
    return {
        "schema": PLAN_SCHEMA,
        "model": report.model,
        "num_layers": report.num_layers,
        "num_kv_heads": report.num_kv_heads,
        "latent": report.latent,
        "num_sliding": report.num_sliding,
        "window": report.window,
        "tokens": _ends(report.tokens),
        "converts": report.converts,
        "total_bytes": report.total_bytes,
        "src": {
            "spec": report.src.spec,
            "ranks": [
                {
                    **_rank(rank),
                    "sent_bytes": sent[index],
                    "table_bytes": tables[index],
                    "route_us": report.route_us[index],
                    "plan_us": report.plan_us[index],
                }
                for index, rank in enumerate(report.src.ranks)
            ],
        },
        "dst": {
            "spec": report.dst.spec,
            "ranks": [
                {**_rank(rank), "received_bytes": received}
                for rank, received in zip(report.dst.ranks, report.received_bytes(), strict=True)
            ],
        },
        "pairs": [_pair(pair) for pair in report.pairs],
    }


def _pair(pair: PairPlan) -> dict[str, Any]:
    return {
        "src": pair.src,
        "dst": pair.dst,
        "parts": [_part(part) for part in pair.parts],
        "num_bytes": pair.num_bytes,
        "num_runs": pair.num_runs,
        "run_bytes": list(pair.run_bytes),
        "num_pages": pair.num_pages,
        "num_boxes": pair.num_boxes,
        "table_bytes": pair.table_bytes,
    }


def _rank(rank: RankPart) -> dict[str, Any]:
    return {"pp_rank": rank.pp_rank, "tp_rank": rank.tp_rank, **_part(rank.held)}


def _part(part: Part) -> dict[str, list[int]]:
    return {"layers": _ends(part.layers), "heads": _ends(part.heads)}


def _ends(one: range) -> list[int]:
    return [one.start, one.stop]


def _sums(side: SideParts, values: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    sums = [0] * len(side.ranks)
    for rank, value in values:
        sums[rank] += value
    return tuple(sums)
