"""Files that are written whole or not at all, and read up to a bound."""

import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvxfer.errors import InvalidUsage

READABLE: Final = 0o644
"""The mode of a file that others than its owner read, whatever the umask."""


def write_whole(
    path: Path, data: bytes, *, mode: int | None = None, make_folders: bool = False
) -> Path:
    """Put a file with ``data`` in the place of ``path`` in one step.

    Args:
        path: where; a link is replaced itself.
        data: all of it.
        mode: of the file; None: that of the one before, and of a new one what the umask leaves.
        make_folders: make those that lack.

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
        if mode is None and path.exists():
            mode = path.stat().st_mode & 0o777
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with part.open("xb") as file:
            file.write(data)
        if mode is not None:
            part.chmod(mode)
        return part.replace(path)
    except OSError as error:
        if part is not None:
            with suppress(OSError):
                part.unlink()
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
