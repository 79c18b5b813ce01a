"""kvxfer pd up: start engines and proxy, say when they serve, end them all at Ctrl-C."""

import argparse
import json
import time
from functools import partial
from typing import Final, NoReturn

from kvxfer.cli.lists import parse_list
from kvxfer.cli.model_side import whole_number
from kvxfer.cli.output import write
from kvxfer.cli.pd import stack_options
from kvxfer.cli.pd.status_line import StatusLine
from kvxfer.errors import InvalidUsage
from kvxfer.pd.launch.counters import read_counters
from kvxfer.pd.launch.scratch import scratch_folder
from kvxfer.pd.launch.spec import MAX_ENGINES, SetupSpec
from kvxfer.pd.launch.stack import Stack
from kvxfer.pd.proxy.options import CONNECTORS

_LOOK_S: Final = 1.0
_MAX_DEVICE: Final = 1023


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    setup = parser.add_argument_group("set-up")
    for name, help_text in (
        ("prefill", "prefill engines (default: 1)"),
        ("decode", "decode engines (default: 1)"),
        ("prefill-tp", "GPUs, or core sets, of a prefill engine (default: 1)"),
        ("decode-tp", "of a decode engine (default: 1)"),
        ("tp", "of the one engine of --aggregated (default: 1)"),
    ):
        setup.add_argument(f"--{name}", metavar="N", help=help_text)
    setup.add_argument("--connector", choices=CONNECTORS, help="what moves KV (default: kvxfer)")
    setup.add_argument("--aggregated", action="store_true", help="one engine for both, no proxy")
    setup.add_argument("--devices", metavar="0,1", help="GPUs, those of prefill engines first")
    stack_options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print where it serves as one line of JSON, and serve until Ctrl-C or SIGTERM.

    Returns:
        0 once it was asked to end.

    Raises:
        InvalidUsage: an option is wrong.
        NotAvailable: no vLLM, or a port is in use.
        PeerLost: a program ended by itself; with the last lines of its log.
        ControlTimeout: not everything is up in time.
    """
    spec = parse_spec(args)
    with scratch_folder(stack_options.kept_logs(args)) as scratch, StatusLine() as line:
        launcher = stack_options.launcher(args, scratch)
        try:
            with launcher.start(spec, partial(line.show_states, "starting")) as stack:
                write(json.dumps(_describe(stack, launcher.model.name)) + "\n")
                _watch(stack, line)
        except KeyboardInterrupt:
            return 0


def parse_spec(args: argparse.Namespace) -> SetupSpec:
    """The set-up that the options describe.

    Raises:
        InvalidUsage: an option is wrong, or of the other kind of set-up.
    """
    pd_only = ("prefill", "decode", "prefill_tp", "decode_tp", "connector", "decode_args")
    wrong = [name for name in pd_only if args.aggregated and getattr(args, name)]
    wrong += ["tp"] if args.tp and not args.aggregated else []
    if wrong:
        kind = "--aggregated" if args.aggregated else "prefill and decode engines"
        raise InvalidUsage(f"--{wrong[0].replace('_', '-')} does not go with {kind}")
    devices = parse_list("--devices", args.devices or "", _device) if args.devices else ()
    extra = stack_options.engine_args(args)
    if args.aggregated:
        return SetupSpec(
            name="aggregated",
            kind="aggregated",
            prefill_tp=_count(args, "tp"),
            devices=devices,
            prefill_args=extra["prefill_args"],
        )
    return SetupSpec(
        name="pd",
        kind="pd",
        connector=args.connector or "kvxfer",
        num_prefill=_count(args, "prefill"),
        num_decode=_count(args, "decode"),
        prefill_tp=_count(args, "prefill_tp"),
        decode_tp=_count(args, "decode_tp"),
        devices=devices,
        prefill_args=extra["prefill_args"],
        decode_args=extra["decode_args"],
    )


def _count(args: argparse.Namespace, name: str) -> int:
    return whole_number(f"--{name.replace('_', '-')}", getattr(args, name) or "1", 1, MAX_ENGINES)


def _device(text: str) -> int:
    return whole_number("--devices", text, 0, _MAX_DEVICE)


def _describe(stack: Stack, model: str) -> dict[str, object]:
    engines = [
        {"name": one.name, "url": one.url, "devices": list(one.devices)} for one in stack.engines
    ]
    return {"url": stack.url, "model": model, "engines": engines}


def _watch(stack: Stack, line: StatusLine) -> NoReturn:
    """Until an engine ends, or somebody ends this."""
    while True:
        stack.require_alive()
        parts = []
        for engine in stack.engines:
            now = read_counters(engine.url)
            what = "no figures" if now is None else f"{now.num_running} run, {now.num_waiting} wait"
            parts.append(f"{engine.name} {what}")
        line.show(f"serving at {stack.url}: {'; '.join(parts)}", key="serving")
        time.sleep(_LOOK_S)
