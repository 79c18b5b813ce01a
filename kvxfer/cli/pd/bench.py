"""kvxfer pd bench: put the articles' load on set-ups, each started and ended in its turn."""

import argparse
import shlex
from pathlib import Path
from typing import Final

from kvxfer.cli.output import write
from kvxfer.cli.pd import load_options, stack_options
from kvxfer.cli.pd.bench_watch import watchers
from kvxfer.cli.pd.status_line import StatusLine
from kvxfer.pd.launch.scratch import scratch_folder
from kvxfer.pd.launch.spec import SetupSpec, parse_setup
from kvxfer.pd.load.measure import Bench
from kvxfer.pd.load.plan import LoadPlan
from kvxfer.pd.load.run import run_setups

_EXIT_CHECK_FAILED: Final = 1
_EXIT_INTERRUPTED: Final = 130
_SETUP: Final = "pd=pd"
_EXTERNAL: Final = "server=external,url="
_CLIENT: Final = (
    ", whose `vllm bench serve` makes the load, also on a server that runs already (--url)"
)
_QUICK: Final = LoadPlan(isl=(256,), osl=(32,), concurrency=(1, 4), prompts_per_concurrency=4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--setup",
        action="append",
        metavar="NAME=KIND[,KEY=VALUE...]",
        help="pd (prefill, decode, prefill-tp, decode-tp, connector), aggregated (tp, reuse), "
        "prefill_only (tp), external (url); devices=0+1; may be given several times "
        f"(default: {_SETUP})",
    )
    what.add_argument("--url", help="a server that runs already, as --setup " + _EXTERNAL + "URL")
    what.add_argument("--out", default="pd-run", metavar="DIR", help="records; a run resumes there")
    what.add_argument("--quick", action="store_true", help="256 in, 32 out, concurrency 1 and 4")
    load_options.add_arguments(parser)
    stack_options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure every point that ``--out`` does not hold yet; print a line for each.

    Returns:
        1 where a set-up or a point failed, 130 after Ctrl-C (what was measured is kept), else 0.

    Raises:
        InvalidUsage: an option is wrong, or ``--out`` holds other set-ups of these names.
        NotAvailable: no vLLM.
    """
    specs = parse_specs(args)
    plan = parse_plan(args)
    timeout_s = load_options.point_timeout_s(args)
    out = Path(args.out)
    with scratch_folder(stack_options.kept_logs(args)) as scratch:
        launcher = stack_options.launcher(args, scratch, _CLIENT)
        bench = Bench(
            plan=plan,
            site=launcher.site,
            model=launcher.model,
            logs=launcher.logs,
            point_timeout_s=timeout_s,
        )
        with StatusLine() as line:
            try:
                failures = run_setups(specs, launcher, bench, out, watchers(line))
            except KeyboardInterrupt:
                line.say(f"interrupted; the same command goes on with what {out} lacks")
                return _EXIT_INTERRUPTED
        scratch.has_failed = bool(failures)
    write(f"kvxfer pd report {shlex.quote(str(out))}\n")
    return _EXIT_CHECK_FAILED if failures else 0


def parse_specs(args: argparse.Namespace) -> list[SetupSpec]:
    """The set-ups that the options name.

    Raises:
        InvalidUsage: one cannot be read.
    """
    texts = [*(args.setup or ()), *([_EXTERNAL + args.url] if args.url else ())]
    common = stack_options.engine_args(args)
    return [parse_setup(text, common) for text in texts or [_SETUP]]


def parse_plan(args: argparse.Namespace) -> LoadPlan:
    """The load that the options describe.

    Raises:
        InvalidUsage: one cannot be read or is out of range.
    """
    return load_options.parse(args, _QUICK if args.quick else LoadPlan())
