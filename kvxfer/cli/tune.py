"""kvxfer tune: measure what is fastest on this machine, and write it down for all transports."""

import argparse
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from kvxfer.cli.lists import one_of, parse_list
from kvxfer.cli.output import show, write
from kvxfer.env import tuning_setting
from kvxfer.errors import InvalidUsage, NotAvailable, ProfileRefused
from kvxfer.report.tune_table import print_profile
from kvxfer.sweep.tune import TuneOptions, TuneRun
from kvxfer.sweep.tune.plan import tunable
from kvxfer.sweep.tune.run import fingerprint_here
from kvxfer.transport import tuned
from kvxfer.tuning import (
    Profile,
    default_path,
    read_profile,
    require_profile_path,
    write_profile,
)

_PIPE_COLUMNS = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.add_argument(
        "--transport",
        metavar="NAME,...",
        help=f"what to tune, of {', '.join(tunable())} (default: all that work here)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few points and candidates, under 60 s on 2 cores"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the profile (default: KVXFER_TUNING, or kvxfer/tuning.json in $XDG_CONFIG_HOME)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--check", action="store_true", help="measure nothing: is the profile of this machine"
    )
    what.add_argument("--show", action="store_true", help="measure nothing: print the profile")


def run(args: argparse.Namespace) -> int:
    """Measure and write, or look at what is there."""
    path = _path(args.out)
    if args.show:
        _print(_read(path))
        return 0
    if args.check:
        _require_of_here(path, _read(path))
        write(f"{path} is of this machine\n")
        return 0
    require_profile_path(path)
    names = () if args.transport is None else parse_list("--transport", args.transport, _name)
    tuning = TuneRun(TuneOptions(names, args.quick, shlex.join(["kvxfer", *sys.argv[1:]])))
    profile = _measure(tuning)
    _print(profile)
    write("".join(f"{note}\n" for note in tuning.notes))
    write_profile(path, profile)
    write(f"written to {path}\n")
    return 0


def _path(out: str | None) -> Path:
    setting = tuning_setting()
    if out is None and setting == tuned.OFF:
        raise InvalidUsage("KVXFER_TUNING is off, so that no profile is used; name a file by --out")
    if out == "":
        raise InvalidUsage("--out is empty; name a file")
    return Path(out or setting) if out or setting else default_path()


def _name(text: str) -> str:
    return one_of("--transport", tunable())(text)


def _read(path: Path) -> Profile:
    try:
        profile = read_profile(path)
    except ProfileRefused as error:
        raise ProfileRefused(f"{path}: {error}") from error
    if profile is None:
        raise NotAvailable(f"there is no profile at {path}; `kvxfer tune` makes one")
    return profile


def _require_of_here(path: Path, profile: Profile) -> None:
    try:
        tuned.require_of_host(profile)
    except ProfileRefused as error:
        raise ProfileRefused(f"{path}: {error}") from error
    used = {section.transport for section in profile.sections}.union(*profile.order.values())
    text = tuned.library_difference(profile, sorted(used), fingerprint_here().libraries)
    if text:
        raise ProfileRefused(f"{path}: {text}; run `kvxfer tune` again")


def _measure(tuning: TuneRun) -> Profile:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task("")
        return tuning.run(
            lambda text, done, total: bar.update(
                task, description=text, completed=done, total=total
            )
        )


def _print(profile: Profile) -> None:
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    show(
        lambda console: print_profile(profile, console),
        width=None if on_terminal else _PIPE_COLUMNS,
    )
