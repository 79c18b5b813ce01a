"""Options of a plan: the costs, the load, the set-ups, the objectives."""

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args

from kvxfer.cli.lists import one_of, parse_list, positive
from kvxfer.cli.model_side import whole_number
from kvxfer.cli.pd.model_options import require_steps_of
from kvxfer.errors import InvalidUsage
from kvxfer.layout import load_model
from kvxfer.pd.load.plan import parse_tokens
from kvxfer.pd.numerals import decimal
from kvxfer.pd.planner.contention import load_contention
from kvxfer.pd.planner.engine_model import EngineModel
from kvxfer.pd.planner.kv_size import KVSize
from kvxfer.pd.planner.predict import Models
from kvxfer.pd.planner.same_model import Model
from kvxfer.pd.planner.search import STRATEGIES, Kind, Space, parse_strategy
from kvxfer.pd.planner.trace import MAX_REQUESTS, Trace
from kvxfer.pd.planner.traces import closed_loop, read_trace
from kvxfer.pd.planner.transfer_model import KINDS, TransferModel, load_transfer

_RANGE: Final = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})")
_MAX_CONCURRENCY: Final = 100_000
_CONCURRENCY: Final = "1..32"
_ROW_OPTIONS: Final = tuple(field.replace("_", "-") for field in KINDS)
_OF_SWEEPS: Final = ("op", "sms", "control-ms", "contention", "strict", *_ROW_OPTIONS)
_OF_LENGTHS: Final = ("isl", "osl", "concurrency")
_OF_TRACES: Final = ("trace-format", "most-requests", "speed")
_MAX_SEQS: Final = 1 << 20
_MAX_TP: Final = 1024


def add_cost_arguments(
    parser: argparse.ArgumentParser, *, engine_required: bool, model_required: bool = True
) -> None:
    """Define what predictions stand on."""
    costs = parser.add_argument_group("what it stands on")
    costs.add_argument(
        "--model",
        required=model_required,
        help="whose KV moves: a known name, or a config.json",
    )
    costs.add_argument(
        "--engine",
        required=engine_required,
        metavar="FILE|NAME",
        help="steps' costs: what kvxfer pd profile wrote, or the name of a shipped one",
    )
    costs.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="FILE",
        help="transfers' times: what kvxfer sweep --json wrote; may be given several times "
        "(without: transfers are free, and marked)",
    )
    add_row_arguments(costs)
    costs.add_argument("--op", choices=("put", "get"), help="of the sweep's rows (default: put)")
    costs.add_argument("--sms", metavar="N", help="of the sweep's rows (default: the fewest)")
    costs.add_argument(
        "--control-ms", metavar="MS", help="of a hand-over besides the copy (default: 0)"
    )
    costs.add_argument(
        "--contention",
        action="append",
        default=[],
        metavar="FILE",
        help="what transfers at once reach together: what kvxfer send --concurrency N --json "
        "wrote, a file for each N, 1 among them (without: no more than one alone)",
    )
    costs.add_argument("--block-size", default="16", metavar="N", help="tokens a block")
    costs.add_argument(
        "--strict", action="store_true", help="refuse transfers that the sweep does not cover"
    )


def models_of(args: argparse.Namespace, engine: EngineModel) -> Models:
    """The costs of that engine, and of the transfers that the options name.

    Raises:
        InvalidUsage: a file cannot be read, an option is wrong or says of a sweep what none is
            given for, or the engine is of another model.
    """
    block_tokens = whole_number("--block-size", args.block_size, 1, 1 << 16)
    shape = load_model(args.model)
    require_steps_of(engine.model, Model.of(shape))
    kv = KVSize.of(shape, dtype=engine.kv_dtype, block_tokens=block_tokens)
    return Models(engine=engine, kv=kv, transfer=_transfer(args))


def _transfer(args: argparse.Namespace) -> TransferModel | None:
    if not args.sweep:
        _refuse(args, _OF_SWEEPS, "goes with --sweep; give one, or leave it out")
        return None
    control_s = 0.0 if args.control_ms is None else _number("--control-ms", args.control_ms) * 1e-3
    return load_transfer(
        [Path(name) for name in args.sweep],
        only=rows_of(args),
        op=args.op or "put",
        sm_count=None if args.sms is None else whole_number("--sms", args.sms, 0, 1024),
        control_s=control_s,
        contention=load_contention([Path(name) for name in args.contention])
        if args.contention
        else (),
        strict=args.strict,
    )


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the load."""
    load = parser.add_argument_group("load")
    load.add_argument("--isl", help="tokens in, such as 8k")
    load.add_argument("--osl", help="tokens out, such as 1k")
    load.add_argument(
        "--concurrency",
        help="requests in flight: 1,4,16, or 1..32 for every power of two between "
        f"(default: {_CONCURRENCY})",
    )
    load.add_argument(
        "--traces",
        metavar="FILE",
        help="instead of those: a trace of Mooncake or vLLM (JSONL) or Azure (CSV)",
    )
    load.add_argument(
        "--trace-format",
        choices=("auto", "mooncake", "vllm", "azure"),
        help="(default: auto, by its first line)",
    )
    load.add_argument("--most-requests", metavar="N", help="of a trace, the first ones")
    load.add_argument("--speed", help="of a trace: 2 sends it in half the time (default: 1)")


def traces_of(args: argparse.Namespace) -> list[Trace]:
    """The loads that the options describe, the lightest first.

    Raises:
        InvalidUsage: an option is wrong or of the other kind of load, or a file cannot be read.
    """
    if args.traces is not None:
        _refuse(args, _OF_LENGTHS, "does not go with --traces, which has its own load")
        speed = 1.0 if args.speed is None else _number("--speed", args.speed)
        most = args.most_requests
        most_requests = None if most is None else _whole("--most-requests", most, MAX_REQUESTS)
        return [
            read_trace(
                Path(args.traces),
                form=args.trace_format or "auto",
                most_requests=most_requests,
                speed=speed,
            )
        ]
    _refuse(args, _OF_TRACES, "goes with --traces; give one, or leave it out")
    if not args.isl or not args.osl:
        raise InvalidUsage("give --isl and --osl, or --traces FILE")
    isl, osl = (parse_tokens(f"--{name}", [getattr(args, name)])[0] for name in ("isl", "osl"))
    return [
        closed_loop(isl=isl, osl=osl, concurrency=count)
        for count in parse_concurrency(
            _CONCURRENCY if args.concurrency is None else args.concurrency
        )
    ]


def add_row_arguments(group: argparse._ActionsContainer) -> None:
    """Define what names rows of a sweep."""
    for name in _ROW_OPTIONS:
        group.add_argument(
            f"--{name}", help="of the sweep's rows, where it has several (as `kvxfer sweep` has it)"
        )


def rows_of(args: argparse.Namespace) -> dict[str, str]:
    """The rows that are named, as `load_transfer` takes them."""
    return {field: value for field in KINDS if (value := getattr(args, field)) is not None}


def refuse_row_options(args: argparse.Namespace) -> None:
    """Check that nothing names rows of a sweep where none is read.

    Raises:
        InvalidUsage: an option does.
    """
    _refuse(args, _ROW_OPTIONS, "goes with --sweep; give one, or leave it out")


def _refuse(args: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """Refuse options that would be left unread."""
    for name in names:
        if getattr(args, name.replace("-", "_")) not in (None, False, []):
            raise InvalidUsage(f"--{name} {reason}")


def parse_concurrency(text: str) -> list[int]:
    """``1,4,16``, or ``1..32`` for 1, 32 and every power of two between; ascending.

    Raises:
        InvalidUsage: it names nothing, or a number out of range.
    """
    values: set[int] = set()
    for part in parse_list("--concurrency", text, str):
        match = _RANGE.fullmatch(part)
        if match is None:
            values.add(_whole("--concurrency", part, _MAX_CONCURRENCY))
            continue
        low, high = (_whole("--concurrency", end, _MAX_CONCURRENCY) for end in match.groups())
        if low > high:
            raise InvalidUsage(f"--concurrency: {part!r} goes down; write {high}..{low}")
        powers = (1 << exponent for exponent in range(high.bit_length()))
        values |= {low, high, *(value for value in powers if low < value < high)}
    return sorted(values)


def add_space_arguments(parser: argparse.ArgumentParser) -> None:
    """Define which set-ups are compared."""
    space = parser.add_argument_group("set-ups")
    space.add_argument("--gpus", default="2,4,8", help="totals to spend; each set-up spends one")
    space.add_argument("--tp", help="TP sizes of an engine (default: those of --engine)")
    space.add_argument(
        "--long-tp", metavar="N", help="of engines for long prompts (default: as the others)"
    )
    space.add_argument("--kinds", default="aggregated,pd", help="aggregated, pd")
    space.add_argument(
        "--budget", default="8192", help="most tokens of a step (chunks); PD takes the largest"
    )
    space.add_argument(
        "--max-seqs", default="256", metavar="N", help="requests that an engine runs"
    )
    space.add_argument(
        "--strategies",
        default="chunked",
        metavar="NAME[:FIELD=VALUE]...,...",
        help=f"compared with each other: {', '.join(STRATEGIES)}, store:gb_per_s=N",
    )
    space.add_argument(
        "--first-token-from",
        default="decode",
        choices=("decode", "prefill"),
        help="which engine's token is the client's first; of prefill with LMCache's proxy",
    )
    space.add_argument(
        "--send",
        default="layers",
        choices=("layers", "chunks", "whole"),
        help="KV moves as layers or chunks are computed, or whole at the end",
    )


def space_of(args: argparse.Namespace, models: Models) -> Space:
    """The set-ups that the options describe.

    Raises:
        InvalidUsage: an option is wrong.
    """
    known = [steps.tp_size for steps in models.engine.steps]
    kinds = parse_list("--kinds", args.kinds, one_of("--kinds", get_args(Kind)))
    return Space(
        num_gpus=parse_list("--gpus", args.gpus, positive("--gpus")),
        tp_sizes=parse_list("--tp", args.tp, positive("--tp")) if args.tp else known,
        kinds=[kind for kind in get_args(Kind) if kind in kinds],
        token_budgets=parse_tokens("--budget", args.budget.split(",")),
        strategies=parse_list("--strategies", args.strategies, parse_strategy),
        long_tp=None if args.long_tp is None else _whole("--long-tp", args.long_tp, _MAX_TP),
        max_num_seqs=_whole("--max-seqs", args.max_seqs, _MAX_SEQS),
        first_token_from=args.first_token_from,
        send=args.send,
    )


def _number(option: str, text: str) -> float:
    number = decimal(text)
    if math.isnan(number):
        raise InvalidUsage(f"{option}: {text!r} is no number")
    return number


def _whole(option: str, text: str, most: int) -> int:
    return whole_number(option, text, 1, most)
