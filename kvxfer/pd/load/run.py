"""A run: every set-up in its turn, started, measured and ended, a record a point.

What a folder holds whole already is not measured again, so that a run that was cut off goes on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from kvxfer.errors import InvalidUsage, KvxferError, PeerLost
from kvxfer.pd.launch.launcher import Launcher
from kvxfer.pd.launch.spec import SetupSpec
from kvxfer.pd.launch.stack import Stack, Watcher
from kvxfer.pd.load.measure import Bench, Target, served_name
from kvxfer.pd.result import SETUP_FILE, PDPoint, PDSetup, load_setup, require_folder, save_setup

_NAME_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Watchers:
    """Who is told of progress.

    Args:
        starting: of a set-up's programs, while it starts.
        began: of a point that is measured now.
        measured: of a point that is.
        failed: of what ended a point or a set-up early.
    """

    starting: Callable[[SetupSpec], Watcher | None] = lambda spec: None
    began: Callable[[SetupSpec, PDPoint], None] = lambda spec, point: None
    measured: Callable[[SetupSpec, PDPoint, Path], None] = lambda spec, point, folder: None
    failed: Callable[[SetupSpec, KvxferError], None] = lambda spec, error: None


def run_setups(
    specs: Sequence[SetupSpec],
    launcher: Launcher,
    bench: Bench,
    out: Path,
    watchers: Watchers,
) -> int:
    """Measure what is missing; returns how many points or set-ups failed.

    A set-up whose points are all there is not started. One that fails does not keep the next from
    its turn.

    Raises:
        InvalidUsage: two set-ups of one name, or ``out`` holds another set-up of that name, or
            cannot be made or written.
    """
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise InvalidUsage(f"set-ups {', '.join(names)}: each needs a name of its own")
    missing = {spec: missing_points(spec, launcher, bench, out / spec.name) for spec in specs}
    todo = {spec: points for spec, points in missing.items() if points}
    for spec in todo:
        require_folder(out / spec.name)
    failures = 0
    for spec, points in todo.items():
        try:
            failures += _run_one(spec, points, launcher, bench, out / spec.name, watchers)
        except KvxferError as error:
            watchers.failed(spec, error)
            failures += 1
    return failures


def missing_points(
    spec: SetupSpec, launcher: Launcher, bench: Bench, folder: Path
) -> list[PDPoint]:
    """Points of a set-up that ``folder`` does not hold whole.

    Raises:
        InvalidUsage: it holds another set-up.
    """
    if (folder / SETUP_FILE).is_file():
        held = load_setup(folder)
        wanted = record_of(spec, launcher, bench.plan.extra_args)
        served = _served_now(spec) or held.served_name
        require_same(folder, held, msgspec.structs.replace(wanted, served_name=served))
    return bench.missing(bench.plan.points(spec), folder)


def _served_now(spec: SetupSpec) -> str | None:
    """What a server that runs already serves; None where it does not say, or there is none."""
    try:
        return None if spec.url is None else served_name(spec.url, _NAME_S)
    except KvxferError:
        return None  # said where something is to be measured


def record_of(spec: SetupSpec, launcher: Launcher, bench_args: Sequence[str] = ()) -> PDSetup:
    """The record of a set-up that has not run.

    Args:
        spec: what it is.
        launcher: what starts it.
        bench_args: what the client is told besides.
    """
    return PDSetup(
        name=spec.name,
        kind=spec.kind,
        connector=spec.connector,
        reuse=spec.reuse,
        model=launcher.model.name,
        num_prefill=spec.num_prefill,
        num_decode=spec.num_decode,
        prefill_tp=spec.prefill_tp,
        decode_tp=spec.decode_tp,
        prefill_args=list(spec.prefill_args),
        decode_args=list(spec.decode_args),
        url=spec.url,
        bench_args=list(bench_args),
        environment=launcher.site.versions,
    )


def _run_one(
    spec: SetupSpec,
    points: Sequence[PDPoint],
    launcher: Launcher,
    bench: Bench,
    folder: Path,
    watchers: Watchers,
) -> int:
    if spec.url is None:
        with launcher.start(spec, watchers.starting(spec)) as stack:
            return measure_stack(spec, points, stack, launcher, bench, folder, watchers)
    target = Target(url=spec.url, model=served_name(spec.url, _NAME_S))
    record = msgspec.structs.replace(
        record_of(spec, launcher, bench.plan.extra_args),
        served_name=target.model,
        started_at=_now(),
    )
    save_setup(folder, record)
    return _measure_all(spec, points, bench, target, folder, watchers)


def measure_stack(
    spec: SetupSpec,
    points: Sequence[PDPoint],
    stack: Stack,
    launcher: Launcher,
    bench: Bench,
    folder: Path,
    watchers: Watchers,
) -> int:
    """Measure a set-up that was started here; returns how many points failed.

    Raises:
        PeerLost: a program of it ended.
    """
    record = msgspec.structs.replace(
        record_of(spec, launcher, bench.plan.extra_args),
        devices=[name for engine in stack.engines for name in engine.devices],
        token_budget=stack.token_budget(),
        started_at=_now(),
    )
    save_setup(folder, record)
    watched = replace(bench, alive=stack.require_alive)
    return _measure_all(spec, points, watched, target_of(stack, launcher), folder, watchers)


def target_of(stack: Stack, launcher: Launcher) -> Target:
    """A running stack as what is measured."""
    return Target(
        url=stack.url,
        model=launcher.model.name,
        prefill_urls=tuple(one.url for one in stack.engines if one.role != "decode"),
        decode_urls=tuple(one.url for one in stack.engines if one.role != "prefill"),
    )


def _measure_all(
    spec: SetupSpec,
    points: Sequence[PDPoint],
    bench: Bench,
    target: Target,
    folder: Path,
    watchers: Watchers,
) -> int:
    """Measure the points; returns how many failed. A set-up that lost a program is given up."""
    failures = 0
    for point in points:
        watchers.began(spec, point)
        try:
            done = bench.measure(target, point, folder)
        except PeerLost:
            raise
        except KvxferError as error:
            bench.alive()  # its log says more than the client's
            watchers.failed(spec, error)
            failures += 1
        else:
            watchers.measured(spec, done, folder)
    return failures


def require_same(folder: Path, found: PDSetup, wanted: PDSetup) -> None:
    """Check that points of two different set-ups do not get into one folder.

    Raises:
        InvalidUsage: names the first difference.
    """
    for field in (
        "kind",
        "connector",
        "reuse",
        "model",
        "num_prefill",
        "num_decode",
        "prefill_tp",
        "decode_tp",
        "prefill_args",
        "decode_args",
        "url",
        "served_name",
        "bench_args",
    ):
        old, new = getattr(found, field), getattr(wanted, field)
        if old != new:
            raise InvalidUsage(
                f"{folder} holds a set-up with {field} {old!r}, and this one has {new!r}; give it "
                "another name, or another --out"
            )


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
