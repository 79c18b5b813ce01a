"""kvxfer pd bench: put the articles' load on set-ups, each started and ended in its turn."""

import argparse
import shlex
from pathlib import Path
from typing import Final

from kvxfer.cli.lists import parse_list, positive
from kvxfer.cli.model_side import whole_number
from kvxfer.cli.output import write
from kvxfer.cli.pd import stack_options
from kvxfer.cli.pd.bench_watch import watchers
from kvxfer.cli.pd.status_line import StatusLine
from kvxfer.errors import InvalidUsage
from kvxfer.pd.launch.launcher import scratch_folder
from kvxfer.pd.launch.spec import SetupSpec, parse_setup
from kvxfer.pd.load.measure import POINT_S, Bench
from kvxfer.pd.load.plan import (
    CONCURRENCY,
    ISL,
    MAX_REQUESTS,
    OSL,
    PROMPTS_PER_CONCURRENCY,
    LoadPlan,
    parse_tokens,
)
from kvxfer.pd.load.run import run_setups

_EXIT_CHECK_FAILED: Final = 1
_EXIT_INTERRUPTED: Final = 130
_SETUP: Final = "pd=pd"
_EXTERNAL: Final = "server=external,url="
_MAX_TIMEOUT_S: Final = 7 * 86400
_QUICK: Final = LoadPlan(isl=(256,), osl=(32,), concurrency=(1, 4), prompts_per_concurrency=4)
_FULL: Final = LoadPlan(
    isl=ISL, osl=OSL, concurrency=CONCURRENCY, prompts_per_concurrency=PROMPTS_PER_CONCURRENCY
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--setup",
        action="append",
        metavar="NAME=KIND[,KEY=VALUE...]",
        help="pd (prefill, decode, prefill-tp, decode-tp, connector), aggregated (tp), "
        "prefill_only (tp), external (url); devices=0+1; may be given several times "
        f"(default: {_SETUP})",
    )
    what.add_argument("--url", help="a server that runs already, as --setup " + _EXTERNAL + "URL")
    what.add_argument("--out", default="pd-run", metavar="DIR", help="records; a run resumes there")
    load = parser.add_argument_group("load (comma-separated lists are swept)")
    load.add_argument("--isl", help="tokens in (default: 1k,8k)")
    load.add_argument("--osl", help="tokens out (default: 1k)")
    load.add_argument("--concurrency", help="requests in flight (default: 1,2,4,8,16,32)")
    load.add_argument(
        "--prompts-per-concurrency",
        metavar="N",
        help=f"prompts of a point, times its concurrency (default: {PROMPTS_PER_CONCURRENCY})",
    )
    load.add_argument("--request-rate", default="inf", help="requests a second")
    load.add_argument("--quick", action="store_true", help="256 in, 32 out, concurrency 1 and 4")
    load.add_argument(
        "--bench-args", default="", metavar="'ARGS'", help="what `vllm bench serve` is told besides"
    )
    load.add_argument(
        "--point-timeout", default=f"{POINT_S:g}", metavar="S", help="of one point, in seconds"
    )
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
    timeout_s = whole_number("--point-timeout", args.point_timeout, 1, _MAX_TIMEOUT_S)
    out = Path(args.out)
    with scratch_folder(stack_options.kept_logs(args)) as folder:
        launcher = stack_options.launcher(args, folder)
        bench = Bench(
            plan=plan,
            site=launcher.site,
            model=launcher.model,
            logs=folder,
            point_timeout_s=timeout_s,
        )
        with StatusLine() as line:
            try:
                failures = run_setups(specs, launcher, bench, out, watchers(line))
            except KeyboardInterrupt:
                line.say(f"interrupted; the same command goes on with what {out} lacks")
                return _EXIT_INTERRUPTED
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
    base = _QUICK if args.quick else _FULL
    try:
        rate = float(args.request_rate)
        extra = tuple(shlex.split(args.bench_args))
    except ValueError as error:
        raise InvalidUsage(f"--request-rate or --bench-args: {error}") from error
    return LoadPlan(
        isl=parse_tokens("--isl", args.isl.split(",")) if args.isl else base.isl,
        osl=parse_tokens("--osl", args.osl.split(",")) if args.osl else base.osl,
        concurrency=parse_list("--concurrency", args.concurrency, positive("--concurrency"))
        if args.concurrency
        else base.concurrency,
        prompts_per_concurrency=whole_number(
            "--prompts-per-concurrency", args.prompts_per_concurrency, 1, MAX_REQUESTS
        )
        if args.prompts_per_concurrency
        else base.prompts_per_concurrency,
        request_rate=rate,
        extra_args=extra,
    )
