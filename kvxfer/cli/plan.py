"""kvxfer plan: who sends what to whom between two parallel layouts, without any memory."""

import argparse
import json
from typing import Final

from kvxfer.cli.json_option import add_json, print_result, require_target
from kvxfer.cli.model_side import model_of, require_ranks, whole_number
from kvxfer.cli.plan_pairs import plan_pairs
from kvxfer.cli.side_spec import PRESETS, Side, parse_side
from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVLayout, ToFp8
from kvxfer.layout.conversion import DESTINATION, SOURCES
from kvxfer.report.plan_result import PlanReport, SideParts, document
from kvxfer.report.plan_table import print_plan

_MAX_TOKENS: Final = 1 << 22


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    keys = "[PRESET,]tp=,pp=,order=,kv=,block=,dtype="
    parser.add_argument("--src", default="tp=1", metavar="SIDE", help=f"what sends: {keys}")
    parser.add_argument(
        "--dst",
        default="tp=1",
        metavar="SIDE",
        help=f"what receives; presets: {', '.join(PRESETS)}",
    )
    parser.add_argument("--model", default="llama-3.1-8b", help="a known model or a config.json")
    parser.add_argument("--kv-heads", metavar="N", help="another number of KV heads")
    parser.add_argument("--tokens", default="8192", metavar="N", help="tokens of the request")
    parser.add_argument(
        "--prefix", default="0", metavar="N", help="tokens that the destination holds already"
    )
    parser.add_argument(
        "--windowed",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="layers that slide move their window alone",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan; returns 0.

    Raises:
        InvalidUsage: an argument is wrong; LayoutMismatch where the sides cannot be joined.
    """
    require_target(args.json)
    report = _report(args)
    print_result(
        args.json,
        lambda: json.dumps(document(report), indent=2),
        lambda console: print_plan(report, console),
    )
    return 0


def _report(args: argparse.Namespace) -> PlanReport:
    src, dst = parse_side(args.src, option="--src"), parse_side(args.dst, option="--dst")
    num_tokens = whole_number("--tokens", args.tokens, 1, _MAX_TOKENS)
    prefix = whole_number("--prefix", args.prefix, 0, num_tokens - 1)
    model = model_of(args.model, args.kv_heads)
    whole = model.kv_layout(windowed=args.windowed)
    for option, side in (("--src", src), ("--dst", dst)):
        require_ranks(option, side, model)
    layouts = (_layout("--src", src, whole), _layout("--dst", dst, whole))
    convert = _conversion(*layouts)
    plans = plan_pairs(
        *layouts, src.ranks(), dst.ranks(), num_tokens=num_tokens, prefix=prefix, convert=convert
    )
    return PlanReport(
        model=model.name,
        num_layers=whole.num_layers,
        num_kv_heads=whole.num_kv_heads,
        latent=model.kind == "mla",
        num_sliding=sum(map(bool, whole.windows)),
        window=max(whole.windows, default=0),
        tokens=range(prefix, num_tokens),
        converts=convert is not None,
        src=SideParts(spec=_spec(src, layouts[0]), tp=src.tp, pp=src.pp, ranks=plans.src),
        dst=SideParts(spec=_spec(dst, layouts[1]), tp=dst.tp, pp=dst.pp, ranks=plans.dst),
        pairs=plans.pairs,
        route_us=plans.route_us,
        plan_us=plans.plan_us,
    )


def _layout(option: str, side: Side, model: KVLayout) -> KVLayout:
    try:
        return side.layout(model)
    except InvalidUsage as error:
        raise InvalidUsage(f"{option}: {error}") from None


def _conversion(src: KVLayout, dst: KVLayout) -> ToFp8 | None:
    """The conversion that the two dtypes ask for, if a copy can do it."""
    return ToFp8() if src.dtype in SOURCES and dst.dtype == DESTINATION else None


def _spec(side: Side, layout: KVLayout) -> str:
    spec = str(side)
    return spec if layout.kv is side.kv else spec.replace(f",kv={side.kv.value}", "")
