"""Options of the commands that start engines."""

import argparse
import shlex
from pathlib import Path
from typing import Final, TypedDict

from kvxfer.cli.model_side import whole_number
from kvxfer.errors import InvalidUsage
from kvxfer.pd.launch import python_site
from kvxfer.pd.launch.launcher import Launcher
from kvxfer.pd.launch.ports import ENGINE_PORTS, FRONT_PORT, LOOPBACK, PortPlan
from kvxfer.pd.launch.scratch import Scratch
from kvxfer.pd.launch.stack import START_S
from kvxfer.pd.models import find_model

ENGINES: Final = ("vllm",)
_MAX_PORT = 65535
_MAX_TIMEOUT_S = 86400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define them."""
    engines = parser.add_argument_group("engines")
    engines.add_argument(
        "--model",
        default="tiny",
        metavar="DIR|NAME",
        help="a folder, a name of the Hugging Face hub, tiny (random weights made here), or "
        "dummy:SHAPE (weights invented by the engine, for speed), such as dummy:llama-3.1-8b",
    )
    engines.add_argument("--engine", choices=ENGINES, default="vllm", help="what serves")
    engines.add_argument("--python", metavar="PROGRAM", help="the Python that has it (this one)")
    for name, who in (("engine", "every"), ("prefill", "each prefill"), ("decode", "each decode")):
        engines.add_argument(
            f"--{name}-args", default="", metavar="'ARGS'", help=f"{who} engine is told besides"
        )
    engines.add_argument(
        "--start-timeout", default=f"{START_S:g}", metavar="S", help="until all is up, in seconds"
    )
    engines.add_argument("--logs", metavar="DIR", help="keep logs there (a scratch folder)")
    add_addresses(parser)


def add_addresses(parser: argparse.ArgumentParser) -> None:
    """Those of what is bound."""
    ports = parser.add_argument_group("addresses")
    ports.add_argument("--host", default=LOOPBACK, help="address that the proxy binds")
    ports.add_argument("--port", default=str(FRONT_PORT), help="port of the proxy")
    ports.add_argument(
        "--engine-ports",
        default=str(ENGINE_PORTS),
        metavar="BASE",
        help="prefill engines from here on, decode engines 100 higher, their init channels 200, "
        "alloc 300, LMCache's notices 400, a store 401 to 403, NixlConnector 500",
    )


def engine_args(args: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """What prefill and decode engines are told besides.

    Raises:
        InvalidUsage: a quotation is not closed.
    """
    try:
        every = shlex.split(args.engine_args)
        return {
            "prefill_args": (*every, *shlex.split(args.prefill_args)),
            "decode_args": (*every, *shlex.split(args.decode_args)),
        }
    except ValueError as error:
        raise InvalidUsage(f"--engine-args, --prefill-args or --decode-args: {error}") from error


def launcher(args: argparse.Namespace, scratch: Scratch, use: str = "") -> Launcher:
    """The launcher that the options describe; what it writes goes to ``scratch``.

    Args:
        args: all options of :func:`add_arguments`.
        scratch: must outlive what is started.
        use: what vLLM is for, as :func:`python_site.look` has it.

    Raises:
        InvalidUsage: an option is wrong; said before vLLM is looked for.
        NotAvailable: there is no vLLM.
    """
    bound = addresses(args)
    timeout_s = whole_number("--start-timeout", args.start_timeout, 1, _MAX_TIMEOUT_S)
    model = find_model(args.model, scratch.models)
    return Launcher(
        site=python_site.look(args.python, use),
        model=model,
        logs=scratch.logs,
        **bound,
        start_timeout_s=timeout_s,
    )


class Addresses(TypedDict):
    """Fields of a launcher."""

    host: str
    port: int
    ports: PortPlan


def addresses(args: argparse.Namespace) -> Addresses:
    """What is bound.

    Raises:
        InvalidUsage: a port is out of range.
    """
    return {
        "host": args.host,
        "port": whole_number("--port", args.port, 1, _MAX_PORT),
        "ports": PortPlan(whole_number("--engine-ports", args.engine_ports, 1, _MAX_PORT)),
    }


def kept_logs(args: argparse.Namespace) -> Path | None:
    """Where logs are kept; None = nowhere."""
    return None if args.logs is None else Path(args.logs)
