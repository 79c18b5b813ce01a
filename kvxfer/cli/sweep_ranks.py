"""The options of ``kvxfer sweep`` that make it one of ranks: --tp, --pp, --kv-heads, --layouts."""

import argparse

from kvxfer.cli.lists import parse_list, positive, size_pair
from kvxfer.cli.side_spec import PRESETS, Side, parse_side
from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVKind, Order
from kvxfer.layout.conversion import DESTINATION, SOURCES
from kvxfer.sweep.cases import LayoutChoice, RankOptions

TOKENS = {"host": "512", "device": "8192"}
QUICK_TOKENS = {"host": "256", "device": "2048"}
# A host shows how memory is reached in the sweep of one pair.
MEMORY = "shared"
_LAYOUTS = ("", "order=hnd", "kv=packed", "block=64", "vllm-cpu", "lmcache")
_QUICK_LAYOUTS = ("", "order=hnd", "vllm-cpu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define them."""
    ranks = parser.add_argument_group(
        "parallel layouts (a process a rank; --tokens is one size by default)"
    )
    ranks.add_argument("--tp", metavar="P:D,...", help="tensor-parallel sizes: 1:1,2:1,1:2,6:4")
    ranks.add_argument("--pp", metavar="P:D,...", help="pipeline-parallel sizes")
    ranks.add_argument("--kv-heads", metavar="N,...", help="KV heads instead of the model's")
    ranks.add_argument(
        "--layouts",
        nargs="*",
        metavar="SPEC",
        help=f"a matrix, each layout to each: order=hnd kv=packed,block=64 {' '.join(PRESETS)} "
        "(no SPEC: a usual set, with --quick a smaller one)",
    )


def are_asked_for(args: argparse.Namespace) -> bool:
    """Whether the sweep is one of ranks."""
    given = (args.tp, args.pp, args.kv_heads, args.layouts)
    return any(value is not None for value in given)


def parse_ranks(args: argparse.Namespace) -> RankOptions:
    """The options of a sweep of ranks.

    Raises:
        InvalidUsage: one that cannot be read.
    """
    return RankOptions(
        tp=parse_list("--tp", "1:1" if args.tp is None else args.tp, size_pair("--tp")),
        pp=parse_list("--pp", "1:1" if args.pp is None else args.pp, size_pair("--pp")),
        kv_heads=()
        if args.kv_heads is None
        else parse_list("--kv-heads", args.kv_heads, positive("--kv-heads")),
        layouts=() if args.layouts is None else _parse_layouts(args),
    )


def parse_devices(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """GPUs of the sources and of the destinations: ``0,1:2,3``, or ``0,1`` for one of each.

    Raises:
        InvalidUsage: it cannot be read.
    """
    sides = text.split(":") if ":" in text else text.split(",")
    numbers = [[part.strip() for part in side.split(",")] for side in sides]
    if len(sides) != 2 or not all(_is_index(one) for side in numbers for one in side):
        raise InvalidUsage(
            f"--devices: {text!r}; write source,destination such as 0,1, or lists such as 0,1:2,3"
        )
    sources, destinations = (tuple(map(int, side)) for side in numbers)
    return sources, destinations


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 4


def _parse_layouts(args: argparse.Namespace) -> tuple[LayoutChoice, ...]:
    sizes = parse_list("--block-size", args.block_size, positive("--block-size"))
    if len(sizes) > 1:
        raise InvalidUsage("--block-size is a list; with --layouts give one, and block=N in a SPEC")
    usual = Side(order=Order(args.order), kv=KVKind.SPLIT, block_size=sizes[0], dtype=args.dtype)
    usual_set = _QUICK_LAYOUTS if args.quick else _LAYOUTS
    choices = [_choice(spec, usual) for spec in args.layouts or usual_set]
    if not args.layouts and args.dtype in SOURCES:
        side = parse_side(f"dtype={DESTINATION}", defaults=usual)
        choices.append(LayoutChoice(DESTINATION, side.layout, as_source=False))
    return tuple(choices)


def _choice(spec: str, usual: Side) -> LayoutChoice:
    side = parse_side(spec, defaults=usual, option="--layouts")
    if (side.tp, side.pp) != (1, 1):
        raise InvalidUsage(f"--layouts: {spec!r} has tp or pp; give --tp and --pp instead")
    return LayoutChoice(spec, side.layout)
