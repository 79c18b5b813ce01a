"""``kvxfer model``: how many bytes the KV of a model takes."""

import argparse
import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvxfer.cli.json_option import add_json, print_result, require_target
from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVKind, KVLayout, ModelShape, TPLayout, load_model
from kvxfer.units import format_bytes

_GIB = 1 << 30
_WIDEST = 10_000  # columns; wider than any table here


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Bytes of one layout for one request."""

    token_per_layer_bytes: int
    token_bytes: int
    page_bytes: int
    block_bytes: int
    layer_bytes: int
    request_bytes: int
    request_blocks: int
    request_blocks_bytes: int
    windowed_request_bytes: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``kvxfer model`` to ``parser``."""
    parser.add_argument("model", metavar="NAME|config.json", help="a known model or a config file")
    parser.add_argument("--tokens", default="8192", help="tokens a request (%(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block (%(default)s)")
    parser.add_argument("--dtype", default="bf16", help="dtype of the KV cache (%(default)s)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (%(default)s)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the figures; returns 0.

    Raises:
        InvalidUsage: an argument is wrong, or the JSON file cannot be written.
    """
    require_target(args.json)
    num_tokens = _parse_tokens(args.tokens)
    model = load_model(args.model)
    layout = model.kv_layout(block_size=args.block_size, dtype=args.dtype)
    _check_tp(model, args.tp)
    ranks = [TPLayout(args.tp, rank) for rank in range(args.tp)]
    whole = _sizes(model, layout, num_tokens)
    per_rank = [_sizes(model, rank.rank_layout(layout), num_tokens) for rank in ranks]
    document = _document(model, layout, ranks, whole, per_rank, num_tokens=num_tokens)
    title = f"{model.name}: KV of {num_tokens:,} tokens, {_describe(layout)}"

    def render(console: Console) -> None:
        _print(title, _whole_table(model, layout, whole), console)
        if args.tp > 1:
            ranks_title = f"bytes of each rank, tensor parallel {args.tp}"
            _print(ranks_title, _rank_table(layout, ranks, per_rank), console)

    print_result(args.json, lambda: json.dumps(document, indent=2), render)
    return 0


def format_size(num_bytes: int) -> str:
    """Write bytes in GiB with three or four decimals, or in a smaller unit below 1 GiB."""
    if num_bytes < _GIB:
        return format_bytes(num_bytes)
    return f"{f'{num_bytes / _GIB:.4f}'.removesuffix('0')} GiB"


def _parse_tokens(text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) == 0:
        raise InvalidUsage(
            f"--tokens: {text!r} is not a whole number above zero; give one such as 8192"
        )
    return int(text)


def _check_tp(model: ModelShape, tp_size: int) -> None:
    # Ranks share the query heads, so more ranks than those cannot run; this also bounds the table.
    if not 1 <= tp_size <= model.num_attention_heads:
        raise InvalidUsage(
            f"--tp is {tp_size}; {model.name} has {model.num_attention_heads} attention heads, so "
            f"use 1 .. {model.num_attention_heads}"
        )


def _sizes(model: ModelShape, layout: KVLayout, num_tokens: int) -> _Sizes:
    num_blocks = layout.num_blocks(num_tokens)
    windowed = model.windowed_request_bytes(layout, num_tokens) if model.sliding_layers else None
    return _Sizes(
        token_per_layer_bytes=layout.bytes_per_token_per_layer,
        token_bytes=layout.bytes_per_token,
        page_bytes=layout.page_bytes,
        block_bytes=layout.block_bytes,
        layer_bytes=layout.layer_bytes(num_tokens),
        request_bytes=layout.request_bytes(num_tokens),
        request_blocks=num_blocks,
        request_blocks_bytes=num_blocks * layout.block_bytes,
        windowed_request_bytes=windowed,
    )


def _print(title: str, table: Table, console: Console) -> None:
    table.title = Text(title)
    table.min_width = min(table.title.cell_len, console.width)  # else a title wraps in mid-line
    # Half a figure is a wrong figure: where the columns need more width than there is, take it.
    needed = Measurement.get(console, console.options.update(width=_WIDEST), table)
    console.width = max(console.width, needed.maximum)
    console.print(table)


def _whole_table(model: ModelShape, layout: KVLayout, sizes: _Sizes) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("part of the KV", no_wrap=True)
    for name in ("bytes", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [
        ("token, one layer", sizes.token_per_layer_bytes),
        ("token, all layers", sizes.token_bytes),
        ("page (block, one plane)", sizes.page_bytes),
        (f"block ({layout.num_planes} planes)", sizes.block_bytes),
        ("layer, all tokens", sizes.layer_bytes),
        ("request", sizes.request_bytes),
        (f"request, {sizes.request_blocks:,} whole blocks", sizes.request_blocks_bytes),
    ]
    if sizes.windowed_request_bytes is not None:
        label = f"request, {model.sliding_layers} layers keep {model.sliding_window} tokens"
        rows.append((label, sizes.windowed_request_bytes))
    for label, num_bytes in rows:
        table.add_row(label, f"{num_bytes:,}", format_size(num_bytes))
    return table


def _rank_table(layout: KVLayout, ranks: list[TPLayout], per_rank: list[_Sizes]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
    names = ["rank", "KV heads", "page", "request", "size"]
    if per_rank[0].windowed_request_bytes is not None:
        names.append("windows kept")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for rank, sizes in zip(ranks, per_rank, strict=True):
        row = [
            str(rank.tp_rank),
            _heads(layout, rank),
            f"{sizes.page_bytes:,}",
            f"{sizes.request_bytes:,}",
            format_size(sizes.request_bytes),
        ]
        if sizes.windowed_request_bytes is not None:
            row.append(f"{sizes.windowed_request_bytes:,}")
        table.add_row(*row)
    return table


def _heads(layout: KVLayout, rank: TPLayout) -> str:
    if layout.kv is KVKind.MLA:
        return "latent"
    heads = rank.heads_of(layout.num_kv_heads)
    return str(heads[0]) if len(heads) == 1 else f"{heads[0]}-{heads[-1]}"


def _describe(layout: KVLayout) -> str:
    return f"{layout.dtype}, blocks of {layout.block_size}, {layout.kv.value}"


def _document(
    model: ModelShape,
    layout: KVLayout,
    ranks: list[TPLayout],
    whole: _Sizes,
    per_rank: list[_Sizes],
    *,
    num_tokens: int,
) -> dict[str, Any]:
    return {
        "model": {
            **asdict(model),
            "sliding_window": model.sliding_window,
            "sliding_layers": model.sliding_layers,
        },
        "layout": asdict(layout),
        "num_tokens": num_tokens,
        "whole": asdict(whole),
        "ranks": [
            {**asdict(rank), "num_kv_heads": rank.rank_layout(layout).num_kv_heads, **asdict(sizes)}
            for rank, sizes in zip(ranks, per_rank, strict=True)
        ],
    }
