"""Options of the commands that put a load on set-ups."""

import argparse
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvxfer.cli.lists import parse_list, positive
from kvxfer.cli.model_side import whole_number
from kvxfer.errors import InvalidUsage
from kvxfer.pd.load.measure import POINT_S
from kvxfer.pd.load.plan import MAX_DURATION_S, MAX_REQUESTS, LoadPlan, parse_tokens
from kvxfer.pd.load.replay import read_replay
from kvxfer.pd.numerals import decimal

_MAX_TIMEOUT_S: Final = 7 * 86400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define them; each replaces what the command does without it."""
    load = parser.add_argument_group("load (comma-separated lists are swept)")
    load.add_argument("--isl", metavar="N,...", help="tokens in, as 1k,8k")
    load.add_argument("--osl", metavar="N,...", help="tokens out")
    load.add_argument(
        "--concurrency",
        metavar="N,...",
        help="requests in flight; at a finite rate the most of them",
    )
    load.add_argument(
        "--prompts-per-concurrency",
        metavar="N",
        help="prompts of a point without a rate, times its concurrency",
    )
    load.add_argument(
        "--request-rate", metavar="R,...", help="requests a second; inf: as concurrency lets them"
    )
    load.add_argument(
        "--burstiness",
        metavar="B,...",
        help="of arrivals at a rate: 1 Poisson, less burstier (shape of a gamma distribution)",
    )
    load.add_argument("--duration", metavar="S", help="a point at a rate sends for so long")
    load.add_argument(
        "--trace", metavar="FILE", help="send the requests of a JSONL trace (Mooncake's or vLLM's)"
    )
    load.add_argument(
        "--bench-args", default="", metavar="'ARGS'", help="what `vllm bench serve` is told besides"
    )
    load.add_argument(
        "--point-timeout", default=f"{POINT_S:g}", metavar="S", help="of one point, in seconds"
    )


def parse(args: argparse.Namespace, base: LoadPlan) -> LoadPlan:
    """The load that the options describe; ``base`` where they say nothing.

    Raises:
        InvalidUsage: one cannot be read or is out of range.
    """
    fields: dict[str, object] = {}
    for name in ("isl", "osl"):
        text = getattr(args, name)
        if text:
            fields[name] = parse_tokens(f"--{name}", text.split(","))
    for name, option in (("request_rates", "request_rate"), ("burstiness", "burstiness")):
        text = getattr(args, option)
        if text:
            fields[name] = parse_list(f"--{option.replace('_', '-')}", text, _rate)
    if args.concurrency:
        fields["concurrency"] = parse_list(
            "--concurrency", args.concurrency, positive("--concurrency")
        )
    if args.prompts_per_concurrency:
        fields["prompts_per_concurrency"] = whole_number(
            "--prompts-per-concurrency", args.prompts_per_concurrency, 1, MAX_REQUESTS
        )
    if args.duration:
        fields["duration_s"] = float(whole_number("--duration", args.duration, 1, MAX_DURATION_S))
    if args.trace:
        fields["replay"] = read_replay(Path(args.trace))
    if args.bench_args:
        fields["extra_args"] = _words(args.bench_args)
    return replace(base, **fields)  # type: ignore[arg-type]


def point_timeout_s(args: argparse.Namespace) -> int:
    """``--point-timeout``.

    Raises:
        InvalidUsage: it is out of range.
    """
    return whole_number("--point-timeout", args.point_timeout, 1, _MAX_TIMEOUT_S)


def _rate(text: str) -> float:
    return math.inf if text == "inf" else decimal(text)  # NaN is refused with the range


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise InvalidUsage(f"--bench-args: {error}") from error
