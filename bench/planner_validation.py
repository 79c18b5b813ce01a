"""How far plans are off: against runs of this project, public rows, and a closed form.

    python bench/planner_validation.py --csv silicon_sample.csv OUT.json [OUT.png]

Nothing is predicted from costs that were fitted to it: of the runs on two H200s one and four
requests in flight are fitted and sixteen predicted, and all of two other sittings; of the public
rows of each engine those of one concurrency are left out of the fit and predicted. Points that were
fitted are in the record too, marked. ``--csv`` as of ``planner_figures.py``.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import planner_public as public
from planner_figures import RUNS

from kvxfer.layout import load_model
from kvxfer.pd.analysis.stalls import STALL_FACTOR, expected_share
from kvxfer.pd.plan_summary import Comparison, ValidatedPoint
from kvxfer.pd.planner import EngineModel, KVSize, Setup, load_transfer, simulate
from kvxfer.pd.planner.figures import find_engine
from kvxfer.pd.planner.predict import Models
from kvxfer.pd.planner.profile_records import engine_of, read_points
from kvxfer.pd.planner.records import validation_json
from kvxfer.pd.planner.validate import validate

ROOT = Path(__file__).resolve().parents[1]
SWEEP = ROOT / "bench" / "results" / "2026-11-29-h200x2-models.json"
FITTED = (
    "prefill/c1-i8192-o1",
    "prefill/c4-i8192-o1",
    "kvx/c1-i8192-o128",
    "kvx/c4-i8192-o128",
)
CLOSED_FORM_ENGINE, CLOSED_FORM_TP = "gpt-oss-120b-h100", 4


def own_runs() -> Iterator[ValidatedPoint]:
    """One prefill and one decode engine with kvxfer, and the prefill engine alone."""
    points = read_points(RUNS / "one")
    models = Models(
        engine=engine_of(points, FITTED, source=", ".join(FITTED)),
        kv=KVSize.of(load_model("llama-3.1-8b")),
        transfer=load_transfer([SWEEP], only={"transport": "nvlink"}),
    )
    yield from validate(points, models, fitted=FITTED)
    for folder, sitting in (("two", "another sitting"), ("three", "a third sitting")):
        others = [point for point in read_points(RUNS / folder) if point.setup.name == "kvx"]
        for one in validate(others, models):
            yield ValidatedPoint(
                setup=f"kvx, {sitting}",
                load=one.load,
                fitted=False,
                comparisons=one.comparisons,
                extrapolated=one.extrapolated,
            )


def public_rows(path: Path) -> Iterator[ValidatedPoint]:
    """Each concurrency but the least and the most, from a fit without it."""
    kv = KVSize.of(load_model(public.MODEL.partition("/")[2]))
    for (system, tp_size), rows in public.by_engine(public.read_rows(path)).items():
        counts = sorted({row.concurrency for row in rows})
        for left_out in counts[1:-1]:
            others = [row for row in rows if row.concurrency != left_out]
            engine = public.engine_with(system, [public.fit_rows(others, kv)], "")
            for row in (row for row in rows if row.concurrency == left_out):
                yield _public(row, engine, kv, f"{public.SYSTEMS[system]} TP{tp_size}")


def _public(row: public.Row, engine: EngineModel, kv: KVSize, setup: str) -> ValidatedPoint:
    ttft_s, tpot_s, run = public.means_of(row, engine, kv)
    return ValidatedPoint(
        setup=setup,
        load=f"c{row.concurrency}-i{row.isl}-o{public.OSL}",
        fitted=False,
        comparisons=(
            Comparison("TTFT mean", row.ttft_s * 1e3, ttft_s * 1e3),
            Comparison("TPOT mean", row.tpot_s * 1e3, tpot_s * 1e3),
        ),
        extrapolated=run.extrapolated,
    )


def closed_form() -> Iterator[ValidatedPoint]:
    """The share of stalled gaps, in percent: the closed form stands for "measured".

    Lengths differ, as of the public rows: of equal ones all requests end together, and few are left
    to be stalled.
    """
    engine = find_engine(CLOSED_FORM_ENGINE)
    kv = KVSize.of(load_model("gpt-oss-120b"))
    for budget in (8192, 2048):
        setup = Setup(kind="aggregated", prefill_tp=CLOSED_FORM_TP, token_budget=budget)
        for isl in (8192, 1024):
            for count in (4, 8, 16, 32):
                row = public.Row("h100_sxm", CLOSED_FORM_TP, isl, count, 0.0, 0.0)
                trace = public.trace_of(row)
                run = simulate(setup, trace, engine, kv)
                share = run.gaps.share_above(STALL_FACTOR * run.gaps.percentile_s(50))
                mean_osl = sum(one.num_output_tokens for one in trace.requests) // len(
                    trace.requests
                )
                expected = expected_share(
                    concurrency=count, isl=isl, osl=mean_osl, token_budget=budget
                )
                yield ValidatedPoint(
                    setup=f"{CLOSED_FORM_ENGINE} TP{CLOSED_FORM_TP}, budget {budget}",
                    load=f"c{count}-i{isl}-o{public.OSL}",
                    fitted=False,
                    comparisons=(Comparison("stalled %", expected * 100, share * 100),),
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("out", type=Path)
    parser.add_argument("picture", type=Path, nargs="?")
    args = parser.parse_args()
    parts = {
        "own runs": list(own_runs()),
        "public rows": list(public_rows(args.csv)),
        "closed form": list(closed_form()),
    }
    for name, points in parts.items():
        for line in _summary(name, points):
            print(line)  # noqa: T201
    facts: dict[str, Any] = {
        "fitted": list(FITTED),
        "parts": {name: len(points) for name, points in parts.items()},
        "sources": [
            "bench/results/2026-11-30-h200x2-pd",
            "aiconfigurator silicon_sample.csv, ai-dynamo/aiconfigurator@095f58a, Apache-2.0",
            "kvxfer.pd.analysis.stalls.expected_share",
        ],
    }
    everything = [point for points in parts.values() for point in points]
    args.out.write_text(validation_json(everything, facts))
    if args.picture is not None:
        from plot_planner_validation import draw

        draw(parts, args.picture)


def _summary(name: str, points: list[ValidatedPoint]) -> Iterator[str]:
    """For each figure of a part: how many, the median and the largest error of those not fitted."""
    errors: dict[str, list[float]] = {}
    for point in points:
        for one in point.comparisons:
            if not point.fitted and one.resolved:
                errors.setdefault(one.figure, []).append(abs(one.error))
    for figure, values in errors.items():
        middle = sorted(values)[len(values) // 2]
        yield f"{name}: {figure}: {len(values)}, median {middle:.1%}, worst {max(values):.1%}"


if __name__ == "__main__":
    main()
