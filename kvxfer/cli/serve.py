"""kvxfer serve: a decode worker that takes requests, checks every byte of them, and says so."""

import argparse
import json
from typing import Final

from kvxfer.cli import worker_side
from kvxfer.cli.model_side import whole_number
from kvxfer.cli.option_words import option_words
from kvxfer.cli.output import write
from kvxfer.cli.parent import Parent
from kvxfer.control.ports import MAX_PORT
from kvxfer.errors import InvalidUsage
from kvxfer.units import format_bytes
from kvxfer.worker.decode import CHANNELS, DecodeWorker, Received
from kvxfer.worker.options import LOOPBACK_HOST

EXIT_CHECK_FAILED: Final = 1
_TOKENS: Final = 4096
_MAX_BLOCKS: Final = 1 << 31
_MAX_REQUESTS: Final = 1 << 40
_LOOK_S: Final = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    worker_side.add_arguments(parser)
    serve = parser.add_argument_group("serving")
    serve.add_argument("--blocks", metavar="N", help=f"of the pool (default: {_TOKENS} tokens)")
    serve.add_argument("--bind", default=LOOPBACK_HOST, metavar="HOST", help="address to bind")
    serve.add_argument(
        "--ports",
        metavar="BASE|W,I,A",
        help="the channels worker, init and alloc: three ports in a row, or each (default: free)",
    )
    serve.add_argument("--advertise-host", metavar="HOST", help="what peers dial, if not --bind")
    serve.add_argument(
        "--requests", metavar="N", help="end after so many requests, warm-ups of senders among them"
    )


def run(args: argparse.Namespace) -> int:
    """Print the addresses as one line of JSON, then a line a request.

    It ends at Ctrl-C, SIGTERM, after ``--requests``, or when the pipe on standard input closes.

    Returns:
        1 where a request had wrong bytes, else 0.

    Raises:
        InvalidUsage: an option is wrong.
        NotAvailable: the transport does not work here, a port is in use, or memory is short.
    """
    far = "check that the sender lives"
    with option_words(bind="--bind", ports="--ports", far=far):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    options = worker_side.parse_options(args, bind_host=args.bind)
    num_blocks = (
        options.layout.num_blocks(_TOKENS)
        if args.blocks is None
        else whole_number("--blocks", args.blocks, 1, _MAX_BLOCKS)
    )
    limit = (
        None
        if args.requests is None
        else whole_number("--requests", args.requests, 1, _MAX_REQUESTS)
    )
    ports = parse_ports(args.ports)
    with DecodeWorker(
        options, num_blocks, ports=ports, advertise_host=args.advertise_host
    ) as worker:
        try:
            write(json.dumps(worker.addresses) + "\n")
            return _serve(worker, limit)
        except KeyboardInterrupt:
            return 0 if worker.num_wrong == 0 else EXIT_CHECK_FAILED


def parse_ports(text: str | None) -> dict[str, int]:
    """Ports of the three channels; none = free ones.

    Raises:
        InvalidUsage: they cannot be read, are out of range, or two are equal.
    """
    if text is None:
        return {}
    parts = text.split(",")
    if len(parts) == 1:
        base = whole_number("--ports", parts[0], 1, MAX_PORT - len(CHANNELS) + 1)
        return {name: base + index for index, name in enumerate(CHANNELS)}
    if len(parts) != len(CHANNELS):
        raise InvalidUsage(
            f"--ports: {text!r}; write one, the first of {len(CHANNELS)} in a row, or "
            f"{len(CHANNELS)}: of {', '.join(CHANNELS)}"
        )
    ports = [whole_number("--ports", part.strip(), 0, MAX_PORT) for part in parts]
    taken = [port for port in ports if port]
    if len(set(taken)) != len(taken):
        raise InvalidUsage(f"--ports: {text!r} has a port twice; give each channel its own")
    return dict(zip(CHANNELS, ports, strict=True))


def line_of(received: Received) -> str:
    """What is printed of a request."""
    head = f"{received.request_id}: {received.num_tokens} tokens, "
    if received.wrong:
        return f"{head}FAILED: {received.wrong}\n"
    if not received.num_checked_bytes:
        return f"{head}received, not checked: its name does not say what it holds\n"
    return f"{head}{format_bytes(received.num_checked_bytes)} received, every byte checked\n"


def _serve(worker: DecodeWorker, limit: int | None) -> int:
    parent = Parent()
    count = 0
    while count != limit and not parent.has_ended():
        received = worker.next(_LOOK_S)
        if received is not None:
            count += 1
            write(line_of(received))
    if count == limit:
        worker.settle()
    return 0 if worker.num_wrong == 0 else EXIT_CHECK_FAILED
