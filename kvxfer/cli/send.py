"""kvxfer send: a prefill worker that sends requests to decode workers, and times them."""

import argparse
import uuid
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

import msgspec

from kvxfer.cli import worker_side
from kvxfer.cli.model_side import whole_number
from kvxfer.cli.option_words import option_words
from kvxfer.cli.output import write
from kvxfer.cli.side_spec import parse_side
from kvxfer.cli.spawned import Spawned, serve_words
from kvxfer.cli.worker_addresses import local_host_to, meet_receivers, read_addresses
from kvxfer.errors import InvalidUsage
from kvxfer.report.export import require_writable, write_file
from kvxfer.sweep.host_memory import require_host_memory
from kvxfer.units import format_bytes
from kvxfer.worker.options import LOOPBACK_HOST, WorkerOptions, device_of
from kvxfer.worker.prefill import LESS_MEMORY, PrefillWorker, SendResult

_MAX_TOKENS: Final = 1 << 22
_MAX_REQUESTS: Final = 1 << 20
_MAX_CONCURRENCY: Final = 1024
_POOL_FACTOR: Final = 2  # blocks are free again once they were checked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    to = parser.add_argument_group("to whom")
    to.add_argument(
        "--to",
        action="append",
        metavar="WHERE",
        help="a decode worker: what kvxfer serve printed, a file that holds it, or HOST:PORT of "
        "its worker channel; once a rank (default: workers that this command starts beside it)",
    )
    to.add_argument("--to-layout", metavar="SPEC", help="of those that it starts")
    worker_side.add_arguments(parser)
    what = parser.add_argument_group("the requests")
    what.add_argument("--tokens", default="512", metavar="N", help="tokens of a request")
    what.add_argument("--requests", default="10", metavar="N", help="requests that are timed")
    what.add_argument("--warmup", default="1", metavar="N", help="requests before those")
    what.add_argument("--concurrency", default="1", metavar="N", help="requests at a time")
    what.add_argument(
        "--name", metavar="NAME", help="of the run, one for all ranks that share its requests"
    )
    what.add_argument(
        "--bind", metavar="HOST", help="address here, of a transport that listens on both sides"
    )
    what.add_argument("--json", metavar="FILE", help="the result too")


def run(args: argparse.Namespace) -> int:
    """Send, and print one line; returns 0.

    Raises:
        InvalidUsage: an option is wrong.
        NotAvailable: the transport does not work here, or memory is short.
        VerificationError: the receiver has found wrong bytes.
        KvxferError: a request failed.
    """
    far = "start kvxfer serve there, or correct --to"
    with option_words(bind="--bind", ports="--to", far=far):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    if args.json is not None:
        require_writable(args.json)
    num_tokens = whole_number("--tokens", args.tokens, 1, _MAX_TOKENS)
    num_requests = whole_number("--requests", args.requests, 1, _MAX_REQUESTS)
    num_warmup = whole_number("--warmup", args.warmup, 0, _MAX_REQUESTS)
    concurrency = whole_number("--concurrency", args.concurrency, 1, _MAX_CONCURRENCY)
    options = worker_side.parse_options(args, bind_host=args.bind or LOOPBACK_HOST)
    with ExitStack() as stack:
        if args.to is None:
            found = _start_receivers(args, options, num_tokens * concurrency, stack)
        else:
            if args.to_layout is not None:
                raise InvalidUsage("--to-layout is of workers that are started here; leave --to")
            found = [read_addresses(text, options.key) for text in args.to]
        if args.bind is None:
            options = replace(options, bind_host=local_host_to(found[0]["init"]))
        receivers = meet_receivers(found, options.key)
        worker = stack.enter_context(
            PrefillWorker(
                replace(
                    options,
                    transport=receivers.transport_for(options.transport),
                    memory=receivers.memory,
                ),
                num_tokens=num_tokens,
                concurrency=concurrency,
                convert=receivers.conversion_of(options.layout),
            )
        )
        result = worker.run(
            receivers.addresses,
            name=args.name or uuid.uuid4().hex,
            num_requests=num_requests,
            num_warmup=num_warmup,
        )
    if args.json is not None:
        write_file(args.json, msgspec.json.format(msgspec.json.encode(result)).decode() + "\n")
    write(line_of(result))
    return 0


def line_of(result: SendResult) -> str:
    """The result as one line."""
    checked = (
        "every byte checked by the receiver" if result.checked else "NOT checked by the receiver"
    )
    return (
        f"{result.num_requests} x {format_bytes(result.request_bytes)} ({result.num_tokens} "
        f"tokens): {result.gb_per_s:.4g} GB/s, latency p50 {result.latency_p50_ms:.4g} ms, "
        f"p99 {result.latency_p99_ms:.4g} ms, {result.actual_path or 'nothing moved'}, {checked}\n"
    )


def _start_receivers(
    args: argparse.Namespace, options: WorkerOptions, num_tokens: int, stack: ExitStack
) -> list[dict[str, str]]:
    """A decode worker a rank of ``--to-layout``, each in a process of its own; their addresses."""
    if options.rank.tp_size * options.rank.pp_size > 1:
        raise InvalidUsage(
            "--layout has several ranks, which send to one receiver; start kvxfer serve, and give "
            "every rank its addresses by --to"
        )
    spec = args.layout if args.to_layout is None else args.to_layout
    side = parse_side(spec, option="--to-layout")
    layout = worker_side.layout_of(args, side, "--to-layout")
    # What does not work is said here, not in the child.
    device = device_of(options)
    num_blocks = _POOL_FACTOR * layout.num_blocks(num_tokens)
    if device < 0:
        require_host_memory(2 * num_blocks * layout.block_bytes, remedy=LESS_MEMORY)
    words = serve_words(args, spec, num_blocks, beside=device)
    started = [
        stack.enter_context(Spawned([*words, "--rank", str(rank)]))
        for rank in range(len(side.ranks()))
    ]
    return [one.read_addresses() for one in started]
