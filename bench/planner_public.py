"""Engines' costs fitted to public means of TTFT and TPOT of aggregated serving.

The rows are those of aiconfigurator's ``silicon_sample.csv`` (Apache-2.0) that come from
InferenceMAX: a closed loop of ``10 * concurrency`` requests whose lengths are uniform from 0.8 of
the nominal ones. The file has one TTFT and one TPOT a row; that they are means is what fits.

A mean of a load is not the cost of a step. For each row the simulator says how many steps and
prefills, its own and others', its means hold; the costs that give the measured means under these
counts are linear least squares; with them the simulator is asked again, until costs stay.
"""

import csv
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from kvxfer.pd.planner.engine_model import (
    DecodePoint,
    EngineModel,
    MeasuredRange,
    Residual,
    StepModel,
)
from kvxfer.pd.planner.fitting import non_negative_least_squares
from kvxfer.pd.planner.kv_size import KVSize
from kvxfer.pd.planner.setup import Setup
from kvxfer.pd.planner.simulate import simulate
from kvxfer.pd.planner.simulated import SimulatedRun
from kvxfer.pd.planner.trace import Request, Trace

MODEL, BACKEND, VERSION, OSL = "openai/gpt-oss-120b", "vllm", "0.18.0", 1024
SYSTEMS = {"h100_sxm": "H100", "h200_sxm": "H200"}
MEMORY_BYTES_PER_S = {"h100_sxm": 3.35e12, "h200_sxm": 4.8e12}  # rated, of NVIDIA's data sheets
KV_READ_BYTES = 36 * 8 * 64 * 2 * 2 / 2  # a token: half of the 36 layers read all of the context
RANGE = 0.8  # of the nominal length, the shortest
TOKEN_BUDGET = 8192
ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Row:
    """One public measurement: means in seconds."""

    system: str
    tp_size: int
    isl: int
    concurrency: int
    ttft_s: float
    tpot_s: float


def read_rows(path: Path) -> list[Row]:
    """Rows of ``MODEL`` on ``SYSTEMS``, each once; later dates of one point win."""
    found: dict[tuple[str, int, int, int], Row] = {}
    with path.open() as file:
        for line in csv.DictReader(file):
            wanted = (line["model_path"], line["backend"], line["backend_version"], line["mode"])
            if wanted != (MODEL, BACKEND, VERSION, "agg") or line["osl"] != str(OSL):
                continue
            if line["system"] in SYSTEMS and int(line["batch_size"]) <= 64:
                row = Row(
                    line["system"],
                    int(line["tp_size"]),
                    int(line["isl"]),
                    int(line["batch_size"]),
                    float(line["silicon_ttft_ms"]) * 1e-3,
                    float(line["silicon_tpot_ms"]) * 1e-3,
                )
                found[row.system, row.tp_size, row.isl, row.concurrency] = row
    return sorted(found.values(), key=lambda r: (r.system, r.tp_size, r.isl, r.concurrency))


def trace_of(row: Row) -> Trace:
    """The load of a row."""
    draw = random.Random(row.concurrency)
    requests = tuple(
        Request(
            0.0,
            draw.randint(int(RANGE * row.isl), row.isl),
            draw.randint(int(RANGE * OSL), OSL),
        )
        for _ in range(10 * row.concurrency)
    )
    return Trace(f"{row.isl} in, {row.concurrency} in flight", requests, row.concurrency)


def means_of(row: Row, engine: EngineModel, kv: KVSize) -> tuple[float, float, SimulatedRun]:
    """Predicted means of TTFT and TPOT of a row, in seconds, and the run."""
    setup = Setup(kind="aggregated", prefill_tp=row.tp_size, token_budget=TOKEN_BUDGET)
    run = simulate(setup, trace_of(row), engine, kv)
    tpot_s = (run.e2el_s - run.ttft_s) / (run.num_output_tokens - 1)
    return float(run.ttft_s.mean()), float(tpot_s.mean()), run


def engine_with(system: str, steps: Sequence[StepModel], source: str) -> EngineModel:
    """The engine of a system."""
    name = f"vLLM {VERSION}, {SYSTEMS[system]}"
    return EngineModel(name=name, model="gpt-oss-120b", source=source, steps=list(steps))


def fit_rows(rows: Sequence[Row], kv: KVSize) -> StepModel:
    """Costs of one engine of one TP size from its rows.

    Unknown: ``d`` at each concurrency, a token of a prompt, a request. ``prefill_base_s`` is ``d``
    of the fewest: a step with a chunk reads the weights too. Means of loads that mix prefill and
    decode do not tell the cost of context from that of prompts; it is the KV that a step reads at
    the memory's rated bandwidth, which is the least that it can be.
    """
    knots = sorted({row.concurrency for row in rows})
    costs_s = np.array([5e-3, *[1e-4] * (len(knots) - 1), 15e-6, 10e-3])
    for _ in range(ROUNDS):
        engine = engine_with(rows[0].system, [_model(costs_s, knots, rows)], "")
        table, wanted, known = [], [], []
        for row in rows:
            table += list(_terms(row, engine, kv, knots))
            wanted += [row.ttft_s, row.tpot_s]
            known += [0.0, _context_s(row) * _context(row)]
        measured_s = np.array(wanted)
        left_s = measured_s - np.array(known)
        costs_s = _robust(np.array(table) / measured_s[:, None], left_s / measured_s)
    errors = (np.array(table) @ costs_s - left_s) / measured_s
    residual = Residual(
        num_rows=len(errors),
        rms=float(np.sqrt(np.mean(errors**2))),
        worst=float(np.abs(errors).max()),
    )
    return _model(costs_s, knots, rows, residual)


def _terms(row: Row, engine: EngineModel, kv: KVSize, knots: list[int]) -> Iterator[list[float]]:
    """How often each cost is in the mean TTFT and in the mean TPOT of a row, by the simulator."""
    steps = engine.steps[0]
    ttft_s, tpot_s, _ = means_of(row, engine, kv)
    mean = (1.0 + RANGE) / 2
    prompt = row.isl * mean
    rises = [
        float(np.clip((row.concurrency - low) / (high - low), 0.0, 1.0))
        for low, high in pairwise(knots)
    ]
    chunk_s = steps.token_s * prompt
    plain_s = steps.step_s(num_decoding=row.concurrency, num_context_tokens=_context(row))
    in_ttft = max(0.0, ttft_s - steps.request_s - steps.prefill_base_s) / chunk_s
    yield [1.0, *[0.0] * len(rises), in_ttft * prompt, 1.0]
    in_tpot = max(0.0, tpot_s - plain_s) / chunk_s
    yield [1.0, *rises, in_tpot * prompt, 0.0]


def _context(row: Row) -> float:
    """Tokens of context of a step in which all decode."""
    return row.concurrency * (row.isl + OSL / 2) * (1.0 + RANGE) / 2


def _context_s(row: Row) -> float:
    return KV_READ_BYTES / (row.tp_size * MEMORY_BYTES_PER_S[row.system])


def _robust(table: np.ndarray, wanted: np.ndarray, limit: float = 0.1) -> np.ndarray:
    """Least squares in which rows that are off by more than ``limit`` weigh less (Huber)."""
    weights = np.ones(len(table))
    for _ in range(10):
        costs_s = non_negative_least_squares(table * weights[:, None], wanted * weights)
        off = np.abs(table @ costs_s - wanted)
        weights = np.sqrt(np.minimum(1.0, limit / np.maximum(off, 1e-9)))
    return costs_s


def _model(
    costs_s: np.ndarray, knots: list[int], rows: Sequence[Row], residual: Residual | None = None
) -> StepModel:
    points_s = np.cumsum(costs_s[: len(knots)]).tolist()
    token_s, request_s = (float(value) for value in costs_s[len(knots) :])
    longest = max(row.isl for row in rows)
    return StepModel(
        tp_size=rows[0].tp_size,
        decode=[DecodePoint(*point) for point in zip(knots, points_s, strict=True)],
        context_s=_context_s(rows[0]),
        prefill_base_s=points_s[0],
        token_s=token_s,
        pair_s=0.0,
        request_s=request_s,
        measured=MeasuredRange(
            num_decoding=knots[-1],
            num_context_tokens=knots[-1] * (longest + OSL),
            num_prompt_tokens=longest,
        ),
        residual=residual,
    )


def by_engine(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """Rows by system and TP size."""
    found: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        found[row.system, row.tp_size].append(row)
    return dict(found)
