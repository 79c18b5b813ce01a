"""kvxfer sweep: move paged KV blocks between two processes, check every byte, and time it."""

import argparse
import sys
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from kvxfer.cli import sweep_far, sweep_ranks
from kvxfer.cli.lists import one_of, parse_list, positive
from kvxfer.cli.option_words import option_words
from kvxfer.cli.output import show
from kvxfer.errors import InvalidUsage, KvxferError
from kvxfer.report.export import (
    require_different,
    require_writable,
    to_csv,
    to_json,
    to_markdown,
    write_file,
)
from kvxfer.report.sweep_table import print_report
from kvxfer.sweep import RankSweepRun, SweepOptions, SweepRun
from kvxfer.sweep.case_run import CaseRun
from kvxfer.sweep.cases import ALL_SMS, AUTO_SMS, DEVICE_MEMORY
from kvxfer.sweep.compute import KINDS
from kvxfer.sweep.paths import resolve_transport
from kvxfer.sweep.peers import PEERS
from kvxfer.sweep.result import SweepReport
from kvxfer.transport import TRANSPORTS
from kvxfer.units import parse_bytes

EXIT_OK = 0
EXIT_CHECK_FAILED = 1
EXIT_NOT_AVAILABLE = 3
EXIT_INTERRUPTED = 130
# A pipe has no width of its own; rows stay whole there.
_PIPE_COLUMNS = 160
_SM_WORDS = {"auto": AUTO_SMS, "all": ALL_SMS}
_MODEL = "llama-3.1-8b"
_TOKENS = "512,2048,8192"
_QUICK_TOKENS = "512,2048"
_MAPPING = ("shm", "nvlink", "loopback")
_NETWORKS = ("ucx", "nixl")  # of both kinds of memory
_QUICK_ITERS = 5
_MAX_THREADS = 256
_MAX_ITERS = 1_000_000
_MAX_SEED = (1 << 62) - 1  # every round counts it up
_ENGINE_HELP = "force a copy engine; CPU: memcpy, streaming; GPU: bulk, load_store, dma"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    _add_what(parser)
    _add_how(parser)
    sweep_ranks.add_arguments(parser)
    sweep_far.add_arguments(parser)
    _add_rounds(parser)
    _add_results(parser)


def _add_what(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to move (lists, X,..., are swept)")
    what.add_argument(
        "--model",
        metavar="NAME,...",
        help=f"catalogue name or config.json path (default: {_MODEL})",
    )
    what.add_argument("--tokens", metavar="N,...", help=f"of a request (default: {_TOKENS})")
    what.add_argument("--block-size", metavar="N,...", default="16", help="tokens of a block")
    what.add_argument(
        "--page-bytes", metavar="SIZE,...", help="raw sweep of page sizes instead of a model"
    )
    what.add_argument(
        "--total-bytes", metavar="SIZE", help="of a raw request (default 256m, on GPUs 1g)"
    )
    what.add_argument(
        "--block-order",
        metavar="ORDER,...",
        default="shuffled",
        help="shuffled, contiguous, fragmented:R (runs of R)",
    )
    what.add_argument(
        "--dtype", metavar="TYPE", default="bfloat16", help="element type of the cache"
    )
    what.add_argument("--order", default="nhd", choices=("nhd", "hnd"), help="axes of a page")


def _add_how(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how to move it")
    how.add_argument("--transport", default="auto", choices=("auto", *TRANSPORTS), help="path")
    how.add_argument(
        "--memory",
        metavar="KIND,...",
        help="the peer's memory: shared, private, device (default: all of the path's)",
    )
    how.add_argument(
        "--op",
        metavar="OP,...",
        default="put",
        help="put (the source copies), get (the destination)",
    )
    how.add_argument(
        "--sms", metavar="N,...", help="GPU SMs for the copy: counts, all, or auto (default: auto)"
    )
    how.add_argument("--engine", default="auto", help=_ENGINE_HELP)
    how.add_argument(
        "--threads", type=int, help="CPU threads for the copy (default: measured best)"
    )
    how.add_argument("--devices", help="source,destination GPU (default 0,1), or 0,1:2,3")
    how.add_argument(
        "--with-compute",
        metavar="KIND[@SIDE]",
        help=f"run {' or '.join(KINDS)} beside the transfers on src (default) or dst",
    )
    how.add_argument(
        "--peers",
        metavar="NAME,...",
        help=f"the same pages moved by what others use too: {','.join(PEERS)}",
    )
    how.add_argument(
        "--strict", action="store_true", help="a slower path than the expected one is an error"
    )


def _add_rounds(parser: argparse.ArgumentParser) -> None:
    rounds = parser.add_argument_group("rounds")
    rounds.add_argument("--iters", type=int, help="timed rounds a case (default by size)")
    rounds.add_argument("--warmup", type=int, default=2, help="untimed rounds a case")
    rounds.add_argument("--seed", type=int, default=0, help="of block tables and patterns")
    rounds.add_argument("--quick", action="store_true", help="a first look, under 20 s on 2 cores")


def _add_results(parser: argparse.ArgumentParser) -> None:
    out = parser.add_argument_group("results besides the table")
    out.add_argument("--json", metavar="FILE", help="everything, schema kvxfer.sweep/1")
    out.add_argument("--csv", metavar="FILE", help="one line a row")
    out.add_argument("--markdown", metavar="FILE", help="the table")


def parse_options(args: argparse.Namespace) -> SweepOptions:
    """Options from parsed arguments.

    Raises:
        InvalidUsage: a list, size or number that cannot be read.
    """
    quick = args.quick
    if args.total_bytes is not None and args.page_bytes is None:
        raise InvalidUsage("--total-bytes is of a raw sweep; give --page-bytes too, or --tokens")
    if args.page_bytes is not None:
        for name, value in (("--tokens", args.tokens), ("--model", args.model)):
            if value is not None:
                raise InvalidUsage(f"{name} is of a sweep of models; leave it, or --page-bytes")
    ranks = sweep_ranks.parse_ranks(args) if sweep_ranks.are_asked_for(args) else None
    tokens = _default_tokens(args) if args.tokens is None else args.tokens
    model = _MODEL if args.model is None else args.model
    sms = "auto" if args.sms is None else args.sms
    memory = args.memory
    if memory is None and args.devices is not None and args.transport in _NETWORKS:
        memory = DEVICE_MEMORY
    elif memory is None:
        memory = _default_memory(args) if ranks is None else sweep_ranks.MEMORY
    devices = None if args.devices is None else sweep_ranks.parse_devices(args.devices)
    return SweepOptions(
        transport=args.transport,
        models=parse_list("--model", model, str),
        tokens=parse_list("--tokens", tokens, positive("--tokens")),
        block_sizes=parse_list("--block-size", args.block_size, positive("--block-size")),
        page_bytes=parse_list("--page-bytes", args.page_bytes, parse_bytes)
        if args.page_bytes is not None
        else (),
        total_bytes=None if args.total_bytes is None else parse_bytes(args.total_bytes),
        block_orders=parse_list("--block-order", args.block_order, str),
        dtype=args.dtype,
        order=args.order,
        memory=parse_list("--memory", memory, str),
        ops=parse_list("--op", args.op, one_of("--op", ("put", "get"))),
        sms=parse_list("--sms", sms, _parse_sms),
        engine=args.engine,
        num_threads=_within("--threads", args.threads, 1, _MAX_THREADS),
        devices=_one_of_each(devices) if devices and ranks is None else None,
        rank_devices=devices if ranks is not None else None,
        ranks=ranks,
        iters=_within("--iters", args.iters, 1, _MAX_ITERS) or (_QUICK_ITERS if quick else None),
        warmup=_within("--warmup", args.warmup, 0, _MAX_ITERS) or 0,
        seed=_within("--seed", args.seed, 0, _MAX_SEED) or 0,
        compute=None if args.with_compute is None else _parse_compute(args.with_compute),
        peers=()
        if args.peers is None
        else parse_list("--peers", args.peers, one_of("--peers", tuple(PEERS))),
        far_address=args.peer or "",
        binding=sweep_far.parse_binding(args),
        strict=args.strict,
    )


def run(args: argparse.Namespace) -> int:
    """Run the sweep and write its results, also what there is after Ctrl-C or an error."""
    if args.listen is not None:
        return sweep_far.listen(args)
    with option_words(bind="--bind", ports="--listen", far=sweep_far.NOBODY):
        return _sweep(args)


def _sweep(args: argparse.Namespace) -> int:
    options = parse_options(args)
    files = ((args.json, to_json), (args.csv, to_csv), (args.markdown, to_markdown))
    outputs = [(path, convert) for path, convert in files if path is not None]
    for path, _ in outputs:
        require_writable(path)
    require_different([path for path, _ in outputs])
    failure: KvxferError | None = None
    kind: type[CaseRun[Any]] = SweepRun if options.ranks is None else RankSweepRun
    with kind(options) as sweep:
        try:
            _run_cases(sweep)
        except KeyboardInterrupt:
            sweep.report.interrupted = True
        except KvxferError as error:
            failure = error
        report = sweep.report
    for path, convert in outputs:
        write_file(path, convert(report))
    if report.interrupted and not report.results and not report.skipped:
        print("kvxfer sweep: interrupted before the first result", file=sys.stderr)
        return EXIT_INTERRUPTED
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    show(
        lambda console: print_report(report, console), width=None if on_terminal else _PIPE_COLUMNS
    )
    if failure is not None:
        raise _shown_once(failure, report, len(sweep.cases))
    if report.failed:
        return EXIT_CHECK_FAILED
    if report.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if report.results else EXIT_NOT_AVAILABLE


def _shown_once(failure: KvxferError, report: SweepReport, num_cases: int) -> KvxferError:
    """What ended the sweep, in other words where the table has said it."""
    if not any(one.failed and str(failure).endswith(one.reason) for one in report.skipped):
        return failure
    num_measured = len(report.results)
    text = f"ended by what is marked FAILED; {num_measured} of {num_cases} rows were measured"
    return type(failure)(text, failure.code)


def _run_cases(sweep: CaseRun[Any]) -> None:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} rounds"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task, end = bar.add_task("", total=sweep.num_rounds), 0
        for case in sweep.cases:
            end += sweep.rounds_of(case)
            bar.update(task, description=case.label)
            sweep.run_case(case, partial(advance, bar, task, end))
            bar.update(task, completed=end)


def advance(bar: Progress, task: TaskID, end: int) -> None:
    """One more round, up to ``end``: those of a row that is measured twice count once."""
    if bar.tasks[task].completed < end:
        bar.advance(task)


def _default_memory(args: argparse.Namespace) -> str:
    # Where memory is not mapped it makes no difference whose it is.
    transport = args.transport
    if transport == "auto" and args.peer is not None:
        transport = resolve_transport(transport, args.peer)
    is_mapped = transport in ("auto", *_MAPPING)
    return "shared,private" if is_mapped else "private"


def _default_tokens(args: argparse.Namespace) -> str:
    if not sweep_ranks.are_asked_for(args):
        return _QUICK_TOKENS if args.quick else _TOKENS
    memory = "device" if resolve_transport(args.transport) == "nvlink" else "host"
    return (sweep_ranks.QUICK_TOKENS if args.quick else sweep_ranks.TOKENS)[memory]


def _parse_sms(text: str) -> int:
    if text in _SM_WORDS:
        return _SM_WORDS[text]
    return positive("--sms")(text)


def _one_of_each(devices: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[int, int]:
    if any(len(side) > 1 for side in devices):
        raise InvalidUsage("--devices names several GPUs of a side; that takes --tp or --layouts")
    return devices[0][0], devices[1][0]


def _parse_compute(text: str) -> tuple[str, str]:
    kind, _, side = text.partition("@")
    side = side or "src"
    if kind not in KINDS or side not in ("src", "dst"):
        raise InvalidUsage(
            f"--with-compute: {text!r}; write {' or '.join(KINDS)}, with @src or @dst"
        )
    return kind, side


def _within(name: str, value: int | None, least: int, most: int) -> int | None:
    if value is not None and not least <= value <= most:
        raise InvalidUsage(f"{name} is {value}; use {least} to {most}")
    return value
