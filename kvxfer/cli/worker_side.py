"""The options that `serve` and `send` share: what a worker holds, and who reaches it."""

import argparse
from dataclasses import replace
from typing import Final

from kvxfer.cli.model_side import model_of, require_ranks, whole_number
from kvxfer.cli.side_spec import PRESETS, Side, parse_side
from kvxfer.control import SharedKey
from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVLayout, TPLayout
from kvxfer.sweep.cases import require_checkable
from kvxfer.worker.options import WorkerOptions, process_transports

MODEL: Final = "llama-3.1-8b"
_MAX_THREADS: Final = 256
_MAX_DEVICE: Final = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define them."""
    what = parser.add_argument_group("the cache")
    what.add_argument("--model", default=MODEL, help="a known model or a config.json")
    what.add_argument("--kv-heads", metavar="N", help="another number of KV heads")
    what.add_argument(
        "--layout",
        default="",
        metavar="SPEC",
        help=f"[PRESET,]tp=,pp=,order=,kv=,block=,dtype=; presets: {', '.join(PRESETS)}",
    )
    what.add_argument(
        "--rank", metavar="R", help="which rank of the layout, those of the first stage first"
    )
    how = parser.add_argument_group("the path")
    how.add_argument(
        "--transport", default="auto", choices=("auto", *process_transports()), help="path"
    )
    how.add_argument(
        "--strict", action="store_true", help="a slower path than the expected one is an error"
    )
    how.add_argument("--threads", metavar="N", help="CPU threads (default: all, to 8)")
    how.add_argument(
        "--device",
        metavar="N",
        help="the GPU that holds the cache (default: the first where the path is nvlink, or auto "
        "and there is one; over nixl and ucx host memory, unless the receiver's is a GPU's)",
    )
    safe = parser.add_argument_group("who may reach it")
    safe.add_argument("--key", metavar="FILE", help="admit holders of this key (see kvxfer key)")
    safe.add_argument("--insecure", action="store_true", help="bind beyond loopback without a key")


def parse_options(args: argparse.Namespace, *, bind_host: str) -> WorkerOptions:
    """One rank of a worker.

    Raises:
        InvalidUsage: an option that cannot be read, or that contradicts another.
    """
    side = parse_side(args.layout, option="--layout")
    threads = args.threads
    return WorkerOptions(
        layout=layout_of(args, side, "--layout"),
        rank=_rank_of(side, args.rank),
        transport=args.transport,
        num_threads=None
        if threads is None
        else whole_number("--threads", threads, 1, _MAX_THREADS),
        device=None
        if args.device is None
        else whole_number("--device", args.device, 0, _MAX_DEVICE),
        bind_host=bind_host,
        key=None if args.key is None else SharedKey.read(args.key),
        insecure=args.insecure,
        strict=args.strict,
    )


def layout_of(args: argparse.Namespace, side: Side, option: str) -> KVLayout:
    """The whole model's cache as ``side`` lays it out.

    Raises:
        InvalidUsage: the model cannot be laid out so.
    """
    model = model_of(args.model, args.kv_heads)
    require_ranks(option, side, model)
    try:
        layout = side.layout(model.kv_layout())
    except InvalidUsage as error:
        raise InvalidUsage(f"{option}: {error}") from None
    # Of a cache in fp8 what it was converted from is checked.
    require_checkable(replace(layout, dtype="bfloat16"), InvalidUsage)
    return layout


def _rank_of(side: Side, text: str | None) -> TPLayout:
    ranks = side.ranks()
    if text is None and len(ranks) > 1:
        raise InvalidUsage(
            f"--layout has {len(ranks)} ranks, each of which is a worker; give --rank 0 .. "
            f"{len(ranks) - 1}"
        )
    return ranks[whole_number("--rank", text or "0", 0, len(ranks) - 1)]
