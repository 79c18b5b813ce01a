"""Make the engines' figures that come with kvxfer: ``kvxfer/pd/planner/figures/*.json``.

    python bench/planner_figures.py --csv silicon_sample.csv [--out FOLDER]

``--csv`` is aiconfigurator's table of measurements; ``figures/README.md`` names its origin. The
runs on two H200s are records of this repository; those with NixlConnector are left out, because it
makes the decode engine wait.
"""

import argparse
from pathlib import Path

import planner_public as public

from kvxfer.layout import load_model
from kvxfer.pd.planner import KVSize
from kvxfer.pd.planner.engine_model import save_engine
from kvxfer.pd.planner.profile_records import engine_of, read_points

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "kvxfer" / "pd" / "planner" / "figures"
RUNS = ROOT / "bench" / "results" / "2026-11-30-h200x2-pd"
SOURCE = (
    "means of TTFT and TPOT of aggregated serving, 1k and 8k in, 1k out, 4 to 64 in flight; "
    "aiconfigurator silicon_sample.csv (ai-dynamo/aiconfigurator@095f58a, Apache-2.0); "
    "context at the memory's rated bandwidth"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=FIGURES)
    args = parser.parse_args()
    kv = KVSize.of(load_model("gpt-oss-120b"))
    steps: dict[str, list[public.StepModel]] = {}
    for (system, _), rows in public.by_engine(public.read_rows(args.csv)).items():
        steps.setdefault(system, []).append(public.fit_rows(rows, kv))
    for system, models in steps.items():
        gpu = public.SYSTEMS[system].lower()
        engine = public.engine_with(system, models, SOURCE)
        save_engine(args.out / f"gpt-oss-120b-{gpu}.json", engine)
    points = [
        point
        for name in ("one", "two")
        for point in read_points(RUNS / name)
        if point.setup.connector != "nixl"
    ]
    source = "kvxfer pd bench, 2026-11-30, two H200s: bench/results/2026-11-30-h200x2-pd"
    save_engine(args.out / "llama-3.1-8b-h200.json", engine_of(points, source=source))


if __name__ == "__main__":
    main()
