"""The tuning profile of this process: loaded once, said or refused, and asked by each transport.

What a caller asks for comes first, then the profile, then the default.
"""

import logging
import os
import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvxfer import _core
from kvxfer.env import tuning_setting
from kvxfer.errors import NotAvailable, ProfileRefused
from kvxfer.layout import CopyPlan
from kvxfer.transport.topology import driver_version, gpu_names
from kvxfer.tuning import (
    DEFAULT_RULE,
    NO_SECTION,
    Fingerprint,
    Profile,
    Rule,
    Section,
    cpu_model,
    default_path,
    difference,
    differences,
    read_profile,
)

OFF = "off"
_AGAIN = "run `kvxfer tune` here, or set KVXFER_TUNING=off"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of the profile.

    Attributes:
        path: of the file; None where none was looked for.
        profile: the one in use; None = the defaults.
        problem: why a file that is there is not used; else empty.
    """

    path: Path | None = None
    profile: Profile | None = None
    problem: str = ""

    @property
    def text(self) -> str:
        """In a line."""
        if self.problem:
            return f"refused: {self.problem}"
        if self.profile is not None:
            return f"{self.path}, of {self.profile.created}"
        return "off" if self.path is None else "none; `kvxfer tune` makes one"


def host_fingerprint(libraries: Mapping[str, str] | None = None) -> Fingerprint:
    """This machine. No CUDA context is made for it, and no library loaded."""
    build = _core.build_info()
    return Fingerprint(
        kvxfer=build.version,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu_model(),
        cpus=str(os.cpu_count() or 1),
        gpus=", ".join(gpu_names()),
        driver=driver_version(),
        cuda=build.cuda_version if build.has_cuda else "",
        libraries=dict(libraries or {}),
    )


def load(setting: str) -> Loaded:
    """What ``KVXFER_TUNING`` names: a path, ``off``, or nothing for the default place."""
    if setting == OFF:
        return Loaded()
    try:
        path = Path(setting) if setting else default_path()
    except NotAvailable:
        return Loaded()
    if not path.is_absolute():  # processes stand in different folders
        return Loaded(path, problem="its path is relative; set KVXFER_TUNING to an absolute one")
    try:
        profile = read_profile(path)
        if profile is None:
            # Nobody asked for the default one.
            return Loaded(path, problem="there is no such file" if setting else "")
        require_of_host(profile)
    except ProfileRefused as error:
        return Loaded(path, problem=str(error))
    return Loaded(path, profile)


def require_of_host(profile: Profile) -> None:
    """Check that a profile is of this machine.

    Raises:
        ProfileRefused: it is of another one; names every field that differs, and both values.
    """
    found = differences(profile.fingerprint, host_fingerprint())
    if found:
        raise ProfileRefused(f"it is of another machine: {'; '.join(found)}; {_AGAIN}")


class _Process:
    """What this process has loaded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: Loaded | None = None
        self._instead: Loaded | None = None
        self._refused: set[str] = set()  # transports and orders of another library

    def get(self) -> Loaded:
        with self._lock:
            if self._instead is not None:
                return self._instead
            if self._own is None:
                self._own = load(tuning_setting())
                _say(self._own)
            return self._own

    def replace(self, instead: Loaded | None) -> Loaded | None:
        with self._lock:
            old, self._instead = self._instead, instead
            return old

    def is_new(self, refused: str) -> bool:
        with self._lock:
            known = refused in self._refused
            self._refused.add(refused)
            return not known


_PROCESS = _Process()


def _say(loaded: Loaded) -> None:
    if loaded.problem:
        _log.warning("tuning profile %s: %s; the defaults are used", loaded.path, loaded.problem)
    elif loaded.profile is not None:
        _log.info("tuning profile %s", loaded.text)


def in_use() -> Loaded:
    """The profile of this process, loaded at the first call; a refused one is warned of once."""
    return _PROCESS.get()


@contextmanager
def using(profile: Profile | None) -> Iterator[None]:
    """Have endpoints and links of this process that are made meanwhile go by another profile.

    Args:
        profile: an empty one = the defaults; None = the process's own.
    """
    old = _PROCESS.replace(None if profile is None else Loaded(profile=profile))
    try:
        yield
    finally:
        _PROCESS.replace(old)


def section(transport: str, memory: str, *, library: Callable[[], str] = str) -> Section:
    """What the profile says of a transport and the peer's memory; empty = the defaults.

    Args:
        transport: its name.
        memory: ``shared``, ``private`` or ``device``.
        library: gives the version of what carries it; one that differs refuses the section.
    """
    profile = in_use().profile
    found = NO_SECTION if profile is None else profile.section(transport, memory)
    if profile is None or found.is_empty:
        return NO_SECTION
    theirs = profile.fingerprint.libraries.get(transport, "")
    own = library()
    if theirs == own:
        return found
    if _PROCESS.is_new(transport):
        text = difference(transport, theirs, own)
        _log.warning("tuning profile: %s; %s goes by the defaults; %s", text, transport, _AGAIN)
    return NO_SECTION


def order(
    memory: str, names: tuple[str, ...], *, libraries: Callable[[], Mapping[str, str]]
) -> tuple[str, ...]:
    """``names`` by the profile's order of ``host`` or ``device`` memory; others come last.

    Args:
        libraries: gives the versions of what carries transports, by their names; one that differs
            refuses the order. It is not called where the order changes nothing.
    """
    profile = in_use().profile
    fast = () if profile is None else profile.order.get(memory, ())  # type: ignore[call-overload]
    known = [name for name in fast if name in names]
    ordered = (*known, *(name for name in names if name not in known))
    if profile is None or ordered == names:
        return names
    text = library_difference(profile, known, libraries())
    if not text:
        return ordered
    if _PROCESS.is_new(f"order of {memory}"):
        _log.warning("tuning profile: %s; `auto` goes by the default order; %s", text, _AGAIN)
    return names


def library_difference(profile: Profile, names: Iterable[str], own: Mapping[str, str]) -> str:
    """The first of these transports whose library is another one here; empty where none is.

    Args:
        own: versions here, by transport.
    """
    measured = profile.fingerprint.libraries
    for name in names:
        pair = measured.get(name, ""), own.get(name, "")
        if pair[0] != pair[1]:
            return difference(name, *pair)
    return ""


def key_of(plan: CopyPlan) -> tuple[int, int]:
    """Run bytes and total bytes, by which a rule is found: the runs of most of its bytes."""
    if len(plan.boxes) == 1:
        return plan.boxes[0].run_bytes, plan.total_bytes
    largest = max(plan.boxes, key=lambda box: box.num_bytes, default=None)
    return (0 if largest is None else largest.run_bytes), plan.total_bytes


def rule_for(section: Section, op: str, plan: CopyPlan) -> Rule:
    """How the profile has ``plan`` run; a conversion was not measured and goes by the defaults."""
    if not section.rules or plan.conversion != "none":
        return DEFAULT_RULE
    return section.rule_for(op, *key_of(plan))
