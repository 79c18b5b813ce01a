"""A sweep as files: JSON of schema ``kvxfer.sweep/1``, CSV and Markdown."""

import csv
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvxfer.errors import InvalidUsage
from kvxfer.report.sweep_table import TEXT_COLUMNS, remarks, table_of
from kvxfer.sweep.result import SweepReport
from kvxfer.whole_file import write_whole

_OPEN_FILE = re.compile(r"/dev/(stdin|stdout|stderr|fd/.*)|/proc/[^/]+/fd/.*")
_NESTED = ("gb_per_s", "latency_us", "plan_us", "post_us")


def to_json(report: SweepReport) -> str:
    """The whole report, indented."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"


def to_csv(report: SweepReport) -> str:
    """One line a result; nested fields become ``gb_per_s_p50`` and so on."""
    rows = [_flatten(msgspec.to_builtins(result)) for result in report.results]
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return out.getvalue()


def to_markdown(report: SweepReport) -> str:
    """The table of the terminal, its remarks, and the environment."""
    table = table_of(report.results)
    rules = ["---" if name in TEXT_COLUMNS else "---:" for name in table]
    lines = [_line(list(table)), _line(rules)]
    lines += [_line(row) for row in zip(*table.values(), strict=True)]
    lines += ["", *(f"- {text}" for text in remarks(report)), ""]
    lines += [f"- {name}: {value}" for name, value in report.environment.items()]
    return "\n".join(lines) + "\n"


def require_writable(path: str) -> None:
    """Check before the work, not after it, that :func:`write_file` can write to ``path``.

    Raises:
        InvalidUsage: it cannot; names the path and the cause.
    """
    if not path:
        raise InvalidUsage("cannot write '': name a file")
    if path == "-":
        raise InvalidUsage("cannot write '-': the table is on standard output; name a file")
    target = _target(path)
    if target.is_dir():
        raise InvalidUsage(f"cannot write {path!r}: it is a folder; name a file")
    if not target.parent.is_dir():
        raise InvalidUsage(f"cannot write {path!r}: there is no folder {str(target.parent)!r}")
    written = [target] if target.exists() else []
    if not _is_stream(target):
        written.append(target.parent)
    if not all(os.access(one, os.W_OK) for one in written):
        raise InvalidUsage(f"cannot write {path!r}: no permission")


def require_different(paths: Sequence[str]) -> None:
    """Check that no two outputs are one file, where the last would replace the others.

    Raises:
        InvalidUsage: two are; names it.
    """
    seen: set[Path] = set()
    for path in paths:
        target = _target(path)
        if target in seen:
            raise InvalidUsage(f"{path!r} is given for two outputs; name a file for each")
        seen.add(target)


def write_file(path: str, content: str | bytes) -> None:
    """Write ``content`` whole or not at all: what was at ``path`` stays where it does not fit.

    A pipe, a device or an open file (``/dev/stdout``, ``/dev/fd/N``) is written as it is; of a link
    the file that it leads to is replaced.

    Raises:
        InvalidUsage: it cannot be written; names the path and the cause.
    """
    data = content.encode() if isinstance(content, str) else content
    target = _target(path)
    if not _is_stream(target):
        write_whole(target, data)
        return
    if sys.stdout is not None:
        sys.stdout.flush()  # it may be where this goes too
    try:
        with target.open("ab") as stream:  # behind what an open file holds already
            stream.write(data)
    except OSError as error:
        raise InvalidUsage(f"cannot write {path!r}: {error.strerror}") from error


def _target(path: str) -> Path:
    given = Path(path)
    # The name of an open file leads to a pipe that has no path, or to a file that others write.
    return given if _is_stream(given) else Path(os.path.realpath(path))


def _is_stream(target: Path) -> bool:
    """Whether it is a pipe, a device or an open file, which is not replaced."""
    is_open_file = _OPEN_FILE.fullmatch(str(target)) is not None
    return is_open_file or (target.exists() and not target.is_file() and not target.is_dir())


def _line(cells: "list[str] | tuple[str, ...]") -> str:
    return "| " + " | ".join(cells) + " |"


def _flatten(record: dict[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in record.items():
        if key in _NESTED and isinstance(value, dict):
            flat.update({f"{key}_{name}": item for name, item in value.items()})
        elif key == "notes" and isinstance(value, list):
            flat[key] = "; ".join(value)
        elif key in ("compute", "slots"):
            flat[key] = msgspec.json.encode(value).decode() if value else ""
        else:
            flat[key] = value
    return flat
