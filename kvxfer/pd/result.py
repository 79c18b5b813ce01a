"""Records of a benchmark of PD set-ups: schemas ``kvxfer.pd-setup/1`` and ``kvxfer.pd-point/1``.

A folder a run, a folder a set-up in it, three files a measured point's worth of load::

    DIR/SETUP/setup.json                  PDSetup: what was run
    DIR/SETUP/c16-i8192-o1024.json        what ``vllm bench serve --save-detailed`` wrote, untouched
    DIR/SETUP/c16-i8192-o1024.point.json  PDPoint: how it was measured

At a finite rate, a point's name goes on with it: ``-r2.5``, ``-b0.5`` where arrivals are burstier
or more even than a Poisson process, and ``-tNAME`` where a trace is replayed.

A point's own record is written last, so that a point is whole where that file is: a run that was
cut off goes on with the points that have none. Fields are only ever added within version 1.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from kvxfer.errors import InvalidUsage
from kvxfer.whole_file import read_bounded, write_whole

SETUP_FILE = "setup.json"
POINT_SUFFIX = ".point.json"
MAX_RECORD_BYTES = 16 << 20

Kind: TypeAlias = Literal["pd", "aggregated", "prefill_only", "external"]
Connector: TypeAlias = Literal["kvxfer", "nixl", "lmcache", "lmcache-together", "none"]
Reuse: TypeAlias = Literal["vllm", "none", "mooncake", "lmcache", "lmcache-far"]
"""Where an engine keeps the KV of prompts for others that begin alike: ``vllm`` in its own prefix
cache, ``none`` nowhere, the others in a store besides, which is started with it; ``lmcache-far`` in
an LMCache server from which the one beside the engine reads by kvxfer."""
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0)]
_Rate: TypeAlias = Annotated[float, msgspec.Meta(ge=1e-3, le=9e4)]
_Trace: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_]{0,40}$")]
_Record = TypeVar("_Record", "PDSetup", "PDPoint")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
_STEM = re.compile(
    r"c[1-9][0-9]{0,8}-i[1-9][0-9]{0,8}-o[1-9][0-9]{0,8}"
    r"(-r[0-9.]{1,12})?(-b[0-9.]{1,12})?(-t[A-Za-z0-9_]{1,40})?"
)
MIN_RATE, MAX_RATE = 1e-3, 9e4
"""Requests a second, and likewise the shape of a gamma distribution."""


class PDSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What one set-up was: engines, model, connector, machine.

    An aggregated set-up has ``num_prefill`` engines that do both and no decode engines; so has one
    of kind ``prefill_only``, whose replies are one token long. ``external`` is a server that was
    running already, at ``url``, and said that it serves ``served_name``; both are None of what was
    started for the run. ``bench_args`` is what the client was told besides. ``reuse`` says which KV
    of earlier prompts engines use. ``token_budget`` is the most tokens of one engine step (vLLM's
    ``max_num_batched_tokens``), None where it is not known.
    """

    schema: Literal["kvxfer.pd-setup/1"] = "kvxfer.pd-setup/1"
    name: str
    kind: Kind
    connector: Connector
    model: str
    reuse: Reuse = "vllm"
    num_prefill: _Count = 1
    num_decode: _Count = 0
    prefill_tp: _Positive = 1
    decode_tp: _Positive = 1
    devices: list[str] = []
    prefill_args: list[str] = []
    decode_args: list[str] = []
    url: str | None = None
    served_name: str | None = None
    bench_args: list[str] = []
    token_budget: _Positive | None = None
    environment: dict[str, str] = {}
    started_at: str = ""  # ISO 8601, UTC

    def __post_init__(self) -> None:
        require_name(self.name)

    @property
    def num_devices(self) -> int:
        """Devices (GPUs, or CPU ranks) of all engines together."""
        return self.num_prefill * self.prefill_tp + self.num_decode * self.decode_tp


class PDPoint(msgspec.Struct, frozen=True, kw_only=True):
    """How one point of load was measured; ``isl`` and ``osl`` are tokens in and out.

    ``request_rate`` is requests a second, None = as fast as ``concurrency`` lets them; of a trace
    it is their mean, and so are ``isl`` and ``osl``. ``burstiness`` is the shape of the gamma
    distribution of the times between arrivals: 1 is a Poisson process, less is burstier. ``trace``
    names what was replayed, empty where prompts are of one size.
    ``served_prompt_tokens`` and ``served_output_tokens`` are what the engines that answer the
    client counted themselves meanwhile, None where nobody asked them. ``findings`` are faults of
    the client that the run saw.
    """

    schema: Literal["kvxfer.pd-point/1"] = "kvxfer.pd-point/1"
    concurrency: _Positive
    num_prompts: _Positive
    isl: _Positive
    osl: _Positive
    request_rate: _Rate | None = None
    burstiness: _Rate = 1.0
    trace: _Trace = ""
    command: list[str] = []
    duration_s: _Seconds = 0.0
    served_prompt_tokens: _Count | None = None
    served_output_tokens: _Count | None = None
    notes: list[str] = []
    findings: list[str] = []

    @property
    def stem(self) -> str:
        """The name of its files, without their suffix: ``c16-i8192-o1024-r2.5``."""
        parts = [f"c{self.concurrency}-i{self.isl}-o{self.osl}"]
        if self.request_rate is not None:
            parts.append(f"r{self.request_rate:g}")
        if self.burstiness != 1.0:
            parts.append(f"b{self.burstiness:g}")
        if self.trace:
            parts.append(f"t{self.trace}")
        return "-".join(parts)


def require_name(name: str) -> None:
    """Check that a set-up's name may be a folder's.

    Raises:
        InvalidUsage: it may not; says what may.
    """
    if _NAME.fullmatch(name) is None:
        raise InvalidUsage(
            f"set-up {name!r}: a name is up to 100 letters, digits and . _ + -, a letter or digit "
            "first"
        )


def bench_path(folder: Path, point: PDPoint) -> Path:
    """Where the client's own JSON of a point lies in the folder of its set-up."""
    return folder / f"{point.stem}.json"


def save_setup(folder: Path, setup: PDSetup) -> Path:
    """Write ``setup.json`` into the set-up's folder, which is made where it is missing.

    Raises:
        InvalidUsage: it cannot be made or written.
    """
    return _save(make_folder(folder) / SETUP_FILE, setup)


def make_folder(folder: Path) -> Path:
    """Make a folder where it is missing.

    Raises:
        InvalidUsage: it cannot be made, or not be written; names it and the cause.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidUsage(f"cannot make the folder {str(folder)!r}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise InvalidUsage(f"cannot write to the folder {str(folder)!r}: no permission")
    return folder


def require_folder(folder: Path) -> None:
    """Check before engines start that a set-up's folder is there or can be made.

    Its run's folder is made; itself only with its record, so that a set-up that fails leaves none.

    Raises:
        InvalidUsage: as :func:`make_folder`.
    """
    make_folder(folder if folder.exists() else folder.parent)


def save_point(folder: Path, point: PDPoint) -> Path:
    """Write a point's own record; call it last, when the client's JSON is complete.

    Raises:
        InvalidUsage: it cannot be written.
    """
    return _save(folder / f"{point.stem}{POINT_SUFFIX}", point)


def load_setup(folder: Path) -> PDSetup:
    """Read the record of a set-up from its folder.

    Raises:
        InvalidUsage: it is missing or not of the schema; names the file and the field.
    """
    return _load(folder / SETUP_FILE, PDSetup)


def load_point(path: Path) -> PDPoint:
    """Read one ``*.point.json``.

    Raises:
        InvalidUsage: as :func:`load_setup`, or its name says another point than its content.
    """
    point = _load(path, PDPoint)
    if path.name != point.stem + POINT_SUFFIX:
        raise InvalidUsage(f"{path} holds the point {point.stem}; rename it, or measure it again")
    return point


def is_measured(folder: Path, wanted: PDPoint) -> bool:
    """Whether a set-up's folder holds this point whole, so that a run that resumes may skip it."""
    path = folder / f"{wanted.stem}{POINT_SUFFIX}"
    try:
        found = load_point(path)
    except InvalidUsage:
        return False
    return found.num_prompts == wanted.num_prompts and bench_path(folder, found).is_file()


def find_setups(folder: Path) -> list[Path]:
    """Folders of set-ups in the folder of a run, by name.

    Raises:
        InvalidUsage: there is none, or no such folder.
    """
    if not folder.is_dir():
        raise InvalidUsage(f"{folder} is no folder; name what `kvxfer pd bench --out` wrote")
    found = sorted(path.parent for path in folder.glob(f"*/{SETUP_FILE}"))
    if not found:
        raise InvalidUsage(
            f"{folder} has no SETUP/{SETUP_FILE}; name what `kvxfer pd bench --out` wrote"
        )
    return found


def find_points(folder: Path) -> tuple[list[Path], list[Path]]:
    """Records of points in a set-up's folder, and results of points that were cut off."""
    whole = sorted(folder.glob(f"*{POINT_SUFFIX}"))
    stems = {path.name.removesuffix(POINT_SUFFIX) for path in whole}
    results = (path for path in sorted(folder.glob("*.json")) if _STEM.fullmatch(path.stem))
    return whole, [path for path in results if path.stem not in stems]


def _save(path: Path, record: PDSetup | PDPoint) -> Path:
    return write_whole(path, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


def _load(path: Path, kind: type[_Record]) -> _Record:
    try:
        return msgspec.json.decode(read_bounded(path, MAX_RECORD_BYTES), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidUsage(f"{path} is not a record of a PD benchmark: {error}") from error
