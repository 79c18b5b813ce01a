"""What was read of a node, before anyone interprets it: live, or from a folder of a capture.

The folder's files, each of them optional:

======================= =====================================================================
``nvml.json``           what NVML and CUDA said, written by ``--capture``
``sysfs.txt``           ``PATH:LINE`` a line, as ``grep -rs '' PATH...`` prints files of
                        ``/sys`` and ``/proc``, and ``PATH -> TARGET`` for links
``acs.json``            PCI bridge -> its ACS control register
``topo.txt``            ``nvidia-smi topo -m``
``p2p.txt``             ``nvidia-smi topo -p2p n``
``p2p-read.txt``        ``nvidia-smi topo -p2p r``
``query.txt``           ``nvidia-smi -q``
``nvlink.txt``          ``nvidia-smi nvlink -s``
``lspci.txt``           ``lspci -D -vvv``, as root
``dmesg.txt``           the kernel's log
``fabricmanager.txt``   ``nv-fabricmanager --version``
``cuda.txt``            what a CUDA program said when it did not start
``perftest-NIC-host.txt``, ``perftest-NIC-gpu.txt``: what ``ib_write_bw -d NIC`` printed, with host
                        memory and with ``--use_cuda``
======================= =====================================================================
"""

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from kvxfer.diagnose.facts import Gpu, GpuPair
from kvxfer.errors import InvalidUsage
from kvxfer.units import format_bytes

_NVML = "nvml.json"
_SYSFS = "sysfs.txt"
_ACS = "acs.json"
_PERFTEST = "perftest-*.txt"
TEXTS = (
    "topo.txt",
    "p2p.txt",
    "p2p-read.txt",
    "query.txt",
    "nvlink.txt",
    "lspci.txt",
    "dmesg.txt",
    "fabricmanager.txt",
    "cuda.txt",
)
# What --capture writes; the others are captured by hand.
_WRITTEN = (_NVML, _SYSFS, _ACS, "dmesg.txt", "fabricmanager.txt")
_Kind = TypeVar("_Kind")
# Far above those of any node; more would keep the checks busy for hours.
_MAX_BYTES = 16 << 20
_MAX_TEXTS = 256
_MAX_INTEGER = 1 << 48
_MAX_LINE = 8 << 10  # a path of 4 KiB at most, and what its file says
# The parts of a path have no colons, but for PCI addresses.
_PART = r"(?:[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]|pci[0-9a-f]{4}:[0-9a-f]{2}|[^:/]+)"
_SYSFS_LINE = re.compile(rf"((?:/{_PART})+):(.*)")


class Nvml(msgspec.Struct, frozen=True, kw_only=True):
    """What NVML and CUDA say.

    Attributes:
        gpus: all that NVML lists; None where it does not start.
        pairs: ordered pairs of them.
        driver: version of the driver, or empty.
        reason: why there are none.
        cuda_status: 0, or the error of the driver with which CUDA does not start.
        cuda_reason: the same in words.
    """

    gpus: tuple[Gpu, ...] | None = None
    pairs: tuple[GpuPair, ...] = ()
    driver: str = ""
    reason: str = ""
    cuda_status: int | None = None
    cuda_reason: str = ""


class Sources(msgspec.Struct, kw_only=True):
    """Everything that was read.

    Attributes:
        nvml: of NVML and CUDA; None where there is no word of them.
        files: path below ``/sys``, ``/proc`` or ``/dev`` -> text without trailing white space.
        links: path -> target as the link says it.
        acs: PCI bridge -> ACS control register; None where that needs root.
        texts: name of the file -> what the tool printed.
        is_live: read off this machine now.
        entries: folder -> names in it, made at the first question for them.
    """

    nvml: Nvml | None = None
    files: dict[str, str] = {}
    links: dict[str, str] = {}
    acs: dict[str, int] | None = None
    texts: dict[str, str] = {}
    is_live: bool = False
    entries: dict[str, set[str]] = {}

    def below(self, folder: str) -> list[str]:
        """Names of the entries of a folder."""
        if not self.entries:
            self.entries = _entries_of([*self.files, *self.links])
        return sorted(self.entries.get(folder.rstrip("/"), ()))

    def number(self, path: str) -> int | None:
        """A file's integer, decimal or 0x; None where it is missing, none, or absurd."""
        try:
            value = int(self.files[path], 0)
        except (KeyError, ValueError):
            return None
        return value if abs(value) < _MAX_INTEGER else None


def read_folder(folder: Path) -> Sources:
    """Sources from a capture.

    Raises:
        InvalidUsage: there is no such folder, or nothing in it that a capture has; a file of it
            cannot be read, is too large, or is none.
    """
    try:
        if not folder.is_dir():
            raise InvalidUsage(f"{str(folder)!r} is no folder; name one that --capture wrote")
        perftests = sorted(path.name for path in folder.glob(_PERFTEST))
    except OSError as error:  # a name that is too long, a folder that may not be searched
        raise InvalidUsage(f"cannot read {str(folder)!r}: {error.strerror}") from error
    if len(perftests) > _MAX_TEXTS:
        raise InvalidUsage(f"{str(folder)!r} has {len(perftests)} files of perftest; {_MAX_TEXTS}")
    found = {
        name: text
        for name in (_NVML, _SYSFS, _ACS, *TEXTS, *perftests)
        if (text := _read(folder / name)) is not None
    }
    if not found:
        names = ", ".join((_NVML, _SYSFS, _ACS, *TEXTS))
        raise InvalidUsage(f"{str(folder)!r} holds no file of a capture; known are {names}")
    files, links = parse_sysfs(found.pop(_SYSFS, ""))
    nvml, acs = found.pop(_NVML, None), found.pop(_ACS, None)
    return Sources(
        nvml=None if nvml is None else _decode(nvml, Nvml, _NVML),
        files=files,
        links=links,
        acs=None if acs is None else _decode(acs, dict[str, int], _ACS),
        texts=found,
    )


def write_folder(sources: Sources, folder: Path) -> list[str]:
    """Write a capture that :func:`read_folder` reads; returns the names of its files.

    A capture that is there already is replaced, all of it: files of two are no node's.

    Raises:
        InvalidUsage: it cannot be written; the folder holds something else, which stays.
    """
    found = {_SYSFS: format_sysfs(sources), **sources.texts}
    for name, value in ((_NVML, sources.nvml), (_ACS, sources.acs)):
        if value is not None:
            found[name] = msgspec.json.format(msgspec.json.encode(value)).decode() + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        older = require_capture(folder)
        for name, text in found.items():
            (folder / name).write_text(text, encoding="utf-8")
        for name in older - found.keys():
            (folder / name).unlink()
    except OSError as error:
        raise InvalidUsage(
            f"cannot write the capture to {str(folder)!r}: {error.strerror}"
        ) from error
    return sorted(found)


def require_capture(folder: Path) -> set[str]:
    """Names of the files of a folder, all of an older ``--capture``; none where it is new.

    Raises:
        InvalidUsage: one of them is not; it cannot be read.
    """
    try:
        entries = sorted(folder.iterdir()) if folder.exists() else []
        others = [path.name for path in entries if not _is_written(path)]
    except OSError as error:
        raise InvalidUsage(
            f"cannot write the capture to {str(folder)!r}: {error.strerror}"
        ) from error
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise InvalidUsage(
            f"{str(folder)!r} holds {others[0]!r}{more}, which --capture did not write; "
            "name a folder that is new or empty, or that holds a capture alone"
        )
    return {path.name for path in entries}


def _is_written(path: Path) -> bool:
    return path.name in _WRITTEN and path.is_file() and not path.is_symlink()


def parse_sysfs(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Files and links of ``sysfs.txt``; lines of one file are joined again."""
    lines: dict[str, list[str]] = {}
    links: dict[str, str] = {}
    for line in text.splitlines():
        if len(line) > _MAX_LINE:
            continue
        path, arrow, target = line.partition(" -> ")
        if arrow and path.startswith("/"):
            links[path] = target.strip()
        elif match := _SYSFS_LINE.fullmatch(line):
            lines.setdefault(match[1], []).append(match[2])
    return {path: "\n".join(parts).strip() for path, parts in lines.items()}, links


def format_sysfs(sources: Sources) -> str:
    """The text of ``sysfs.txt``."""
    lines = [
        f"{path}:{line}"
        for path, value in sorted(sources.files.items())
        for line in value.splitlines() or [""]
    ]
    lines += [f"{path} -> {target}" for path, target in sorted(sources.links.items())]
    return "\n".join(lines) + "\n"


def read_bytes(path: Path) -> bytes:
    """A regular file of bounded size, which a capture or a report is.

    Raises:
        FileNotFoundError: there is none.
        InvalidUsage: it cannot be read, is too large, or is a pipe or a device.
    """
    try:
        # Without waiting for the other end of a pipe, which may never come.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as f:
            if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
                raise InvalidUsage(f"{str(path)!r} is no regular file")
            content = f.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidUsage(f"cannot read {str(path)!r}: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise InvalidUsage(
            f"{str(path)!r} has more than {format_bytes(_MAX_BYTES)}; cut it to what matters"
        )
    return content


def _read(path: Path) -> str | None:
    try:
        return read_bytes(path).decode(errors="replace")
    except FileNotFoundError:
        return None


def _decode(text: str, kind: type[_Kind], name: str) -> _Kind:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidUsage(f"{name} of the capture cannot be read: {error}") from error


def _entries_of(paths: Sequence[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        while name and name not in found.setdefault(folder, set()):
            found[folder].add(name)
            folder, _, name = folder.rpartition("/")
    return found
