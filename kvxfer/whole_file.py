"""Files that are written whole or not at all, and read up to a bound."""

import os
import tempfile
from pathlib import Path
from typing import Final

from kvxfer.errors import InvalidUsage

_MODE: Final = 0o644  # a temporary file is its owner's alone, and whoever collects it is another


def write_whole(path: Path, data: bytes, *, make_folders: bool = False) -> Path:
    """Put a file with ``data`` in the place of ``path`` in one step.

    Raises:
        InvalidUsage: it cannot be written, or is there and no regular file (a device, say), which
            this would put one in the place of; names the path and the cause.
    """
    part = None
    try:
        if path.exists() and not path.is_file():
            raise InvalidUsage(f"cannot write {str(path)!r}: it is no regular file; name another")
        if make_folders:
            path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        part = Path(name)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        part.chmod(_MODE)
        return part.replace(path)
    except OSError as error:
        if part is not None:
            part.unlink(missing_ok=True)
        raise InvalidUsage(f"cannot write {str(path)!r}: {error.strerror}") from error


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """The content of a file.

    Raises:
        InvalidUsage: it cannot be read, or is larger than ``most_bytes``.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise InvalidUsage(f"cannot read {path}: {error.strerror}") from error
    if len(content) > most_bytes:
        raise InvalidUsage(f"{path} is larger than {most_bytes} bytes, the most that is read")
    return content
