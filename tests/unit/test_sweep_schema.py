"""Schema ``kvxfer.sweep/1``: a second, strict description of it, written from the manual."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxfer.report.export import to_json
from kvxfer.sweep import SweepOptions, SweepRun
from kvxfer.sweep.result import ComputeEffect, Skipped, SweepReport

MANUAL = Path(__file__).resolve().parents[2] / "bench" / "README.md"
Document = dict[str, Any]


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """No field may be missing, and none more may be there."""


class Rate(Strict):
    p50: float
    min: float
    max: float


class Latency(Strict):
    p50: float
    p90: float
    p99: float


class Median(Strict):
    p50: float


class Compute(Strict):
    kind: str
    side: str
    alone_us: float
    beside_us: float


class Slots(Strict):
    place: str
    num_slots: int
    slot_bytes: int


class Row(Strict):
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
    physical_limit_gb_per_s: float | None
    compute: Compute | None
    sm_budget: str
    num_kv_heads: int | None
    src_layout: str
    dst_layout: str
    src_pp: int
    dst_pp: int
    convert: str
    run_bytes: int | None
    num_runs: int | None
    rank_spread: float | None
    peer: str
    settings: str
    slots: Slots | None


class SkippedCase(Strict):
    case: str
    reason: str
    failed: bool
    src_layout: str
    dst_layout: str


class Report(Strict):
    schema: str
    environment: dict[str, str]
    results: list[Row]
    skipped: list[SkippedCase]
    interrupted: bool


def read(document: Document) -> Report:
    return msgspec.json.decode(json.dumps(document), type=Report)


@pytest.fixture(scope="module")
def report() -> SweepReport:
    """A small real sweep; by hand what this machine may not have, compute and a skipped case."""
    options = SweepOptions(
        transport="loopback",
        models=("llama-3.1-8b",),
        tokens=(32,),
        memory=("private",),
        iters=3,
        warmup=1,
        num_threads=1,
    )
    with SweepRun(options) as run:
        for case in run.cases:
            run.run_case(case)
    effect = ComputeEffect("gemm", "src", 1500.0, 1545.0)
    row = msgspec.structs.replace(
        run.report.results[0], physical_limit_gb_per_s=450.0, compute=effect, notes=["a note"]
    )
    run.report.results.append(row)
    run.report.skipped.append(Skipped("a case", "a reason", False))
    return run.report


@pytest.fixture
def document(report: SweepReport) -> Document:
    """The report as ``--json`` writes it."""
    decoded: Document = json.loads(to_json(report))
    return decoded


def test_the_document_has_exactly_the_fields_of_the_schema(document: Document) -> None:
    found = read(document)
    assert found.schema == "kvxfer.sweep/1"
    assert not found.interrupted
    assert [row.compute is None for row in found.results] == [True, False]
    assert found.environment["kvxfer"]
    assert all(found.environment.values())


def test_the_figures_belong_together(document: Document) -> None:
    row = read(document).results[0]
    assert (row.transport, row.model, row.order, row.op) == (
        "loopback",
        "llama-3.1-8b",
        "nhd",
        "put",
    )
    assert (row.block_order, row.memory, row.dtype) == ("shuffled", "private", "bfloat16")
    assert (row.num_tokens, row.block_size, row.page_bytes) == (32, 16, 32768)
    assert (row.src_tp, row.dst_tp, row.sm_count, row.num_threads, row.iters) == (1, 1, 0, 1, 3)
    assert row.num_pages == 2 * 64
    assert row.total_bytes == row.num_pages * row.page_bytes == 32 * 131072
    assert 0 < row.gb_per_s.min <= row.gb_per_s.p50 <= row.gb_per_s.max
    assert 0 < row.latency_us.p50 <= row.latency_us.p90 <= row.latency_us.p99
    assert row.gb_per_s.p50 == pytest.approx(row.total_bytes / row.latency_us.p50 / 1e3)
    assert row.fraction_of_limit == pytest.approx(row.gb_per_s.p50 / row.limit_gb_per_s)
    assert row.plan_us.p50 > 0  # comes before what the latency counts
    assert 0 < row.post_us.p50 < row.latency_us.p50
    assert row.verified
    assert row.actual_path.startswith("one process")
    assert row.physical_limit_gb_per_s is None


def parts(document: Document) -> dict[str, Document]:
    """Every object of the schema, by its place."""
    row = document["results"][1]
    nested = {name: row[name] for name in row if isinstance(row[name], dict)}
    return {"report": document, "row": row, "skipped": document["skipped"][0], **nested}


def rename(part: Document, name: str) -> None:
    part[name + "_"] = part.pop(name)


def remove(part: Document, name: str) -> None:
    del part[name]


def retype(part: Document, name: str) -> None:
    part[name] = [part[name]]


FIELDS = [
    *[("report", name) for name in Report.__struct_fields__],
    *[("row", name) for name in Row.__struct_fields__],
    *[("skipped", name) for name in SkippedCase.__struct_fields__],
    *[("compute", name) for name in Compute.__struct_fields__],
    *[("gb_per_s", name) for name in Rate.__struct_fields__],
    *[("latency_us", name) for name in Latency.__struct_fields__],
    *[(place, "p50") for place in ("plan_us", "post_us")],
]


@pytest.mark.parametrize("change", [rename, remove, retype])
@pytest.mark.parametrize(("place", "name"), FIELDS)
def test_a_changed_field_is_seen(
    document: Document, place: str, name: str, change: Callable[[Document, str], None]
) -> None:
    read(document)
    change(parts(document)[place], name)
    with pytest.raises(msgspec.ValidationError):
        read(document)


@pytest.mark.parametrize("place", sorted({place for place, _ in FIELDS}))
def test_a_field_more_is_seen(document: Document, place: str) -> None:
    parts(document)[place]["extra"] = 1
    with pytest.raises(msgspec.ValidationError, match="unknown field `extra`"):
        read(document)


def undefined(manual: str) -> list[str]:
    """Fields that no row of a table of the manual defines."""
    defined = set(re.findall(r"^\| `([\w.]+)", manual, re.MULTILINE))
    flat, nested = ("report", "row", "skipped"), {place for place, _ in FIELDS}
    wanted = [name if place in flat else f"{place}.{name}" for place, name in FIELDS]
    return [name for name in wanted if name not in defined | nested]


def test_the_manual_defines_every_field() -> None:
    manual = MANUAL.read_text(encoding="utf-8")
    assert undefined(manual) == []
    assert undefined(manual.replace("| `latency_us.p99`", "| `latency_us.p98`")) == [
        "latency_us.p99"
    ]
