"""kvxfer pd proxy: one OpenAI server in front of prefill and decode engines."""

import argparse
import asyncio
import json
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvxfer.cli.model_side import whole_number
from kvxfer.cli.output import write
from kvxfer.control.ports import MAX_PORT
from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.pd.numerals import decimal
from kvxfer.pd.proxy.options import CONNECTORS, LOOPBACK_HOST, ROUTINGS, Limits, ProxyOptions
from kvxfer.pd.proxy.pairing import decode_engines, prefill_engines
from kvxfer.units import parse_bytes

_MAX_ENGINES: Final = 1024
_MAX_SECONDS: Final = 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    front = parser.add_argument_group("where clients come")
    front.add_argument("--host", default=LOOPBACK_HOST, help="address to bind")
    front.add_argument("--port", default="9100", metavar="P", help="0 takes a free one")
    front.add_argument("--max-body", default="32m", metavar="SIZE", help="of a request")
    front.add_argument(
        "--request-timeout", default="3600", metavar="S", help="seconds that one may take"
    )

    engines = parser.add_argument_group(
        "engines", "lists are comma-separated; one host and one port stand for ports in a row"
    )
    for name, role, port in (("prefiller", "prefill", "7100"), ("decoder", "decode", "7200")):
        engines.add_argument(
            f"--{name}-host", default=LOOPBACK_HOST, metavar="HOSTS", help=f"of {role} engines"
        )
        engines.add_argument(f"--{name}-port", default=port, metavar="PORTS", help="of HTTP")
        engines.add_argument(f"--num-{name}s", default="1", metavar="N", help=f"{role} engines")
    for channel, port in (("init", "7300"), ("alloc", "7400")):
        engines.add_argument(
            f"--decoder-{channel}-port", default=port, metavar="PORTS",
            help="a port for each TP rank; for several decoders the first's, or one list each "
            "with ; between them",
        )  # fmt: skip
    engines.add_argument(
        "--api-key", metavar="KEY|@FILE",
        help="for the engines, where a client sends no Authorization header",
    )  # fmt: skip
    engines.add_argument("--connect-timeout", default="2", metavar="S", help="seconds")

    how = parser.add_argument_group("how requests pass")
    how.add_argument("--connector", choices=CONNECTORS, default="kvxfer", help="what moves KV")
    how.add_argument("--routing", choices=ROUTINGS, default="least-tokens", help="of engines")
    how.add_argument(
        "--proxy-host", default=LOOPBACK_HOST, metavar="HOST",
        help="address to bind for LMCache's notices (pd_proxy_host)",
    )  # fmt: skip
    how.add_argument("--proxy-port", default="7500", metavar="P", help="the same (pd_proxy_port)")


def run(args: argparse.Namespace) -> int:
    """Print the URL as one line of JSON, and serve until Ctrl-C or SIGTERM; returns 0.

    Raises:
        InvalidUsage: an option is wrong.
        NotAvailable: aiohttp is not installed, or an address cannot be bound.
    """
    options = parse_options(args)
    if find_spec("aiohttp") is None:
        raise NotAvailable("the proxy needs aiohttp: pip install aiohttp")
    asyncio.run(_serve(options))
    return 0


def parse_options(args: argparse.Namespace) -> ProxyOptions:
    """What the command line says.

    Raises:
        InvalidUsage: an option is wrong.
    """
    num_prefill = whole_number("--num-prefillers", args.num_prefillers, 1, _MAX_ENGINES)
    num_decode = whole_number("--num-decoders", args.num_decoders, 1, _MAX_ENGINES)
    prefill = prefill_engines(args.prefiller_host, args.prefiller_port, num_prefill)
    decode = decode_engines(
        args.decoder_host,
        args.decoder_port,
        num_decode,
        args.decoder_init_port,
        args.decoder_alloc_port,
    )
    return ProxyOptions(
        engines=prefill + decode,
        connector=args.connector,
        routing=args.routing,
        host=args.host,
        port=whole_number("--port", args.port, 0, MAX_PORT),
        notice_host=args.proxy_host,
        notice_port=whole_number("--proxy-port", args.proxy_port, 0, MAX_PORT),
        api_key=_key(args.api_key),
        limits=Limits(
            body_bytes=parse_bytes(args.max_body),
            connect_s=_seconds("--connect-timeout", args.connect_timeout),
            request_s=_seconds("--request-timeout", args.request_timeout),
        ),
    )


def _key(text: str | None) -> str | None:
    """A key, or the first line of the file that ``@`` names: a command line is seen by all."""
    if text is None or not text.startswith("@"):
        return text
    try:
        key = Path(text[1:]).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidUsage(f"--api-key: cannot read {text[1:]!r}: {error}") from error
    if not key.isprintable() or not key:
        raise InvalidUsage(f"--api-key: {text[1:]!r} holds no key; write it on one line")
    return key


def _seconds(option: str, text: str) -> float:
    seconds = decimal(text)
    if not 0 < seconds <= _MAX_SECONDS:
        raise InvalidUsage(f"{option}: {text!r} is no number of seconds; use 0 < s <= 1e6")
    return seconds


async def _serve(options: ProxyOptions) -> None:
    from kvxfer.pd.proxy.run import serve  # aiohttp is an extra

    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await serve(options, ended, lambda url: write(json.dumps({"url": url}) + "\n"))
