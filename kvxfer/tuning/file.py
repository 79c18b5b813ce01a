"""Where the profile lies, read within bounds and written in one step."""

import os
import stat
import tempfile
from pathlib import Path

from kvxfer.env import config_home
from kvxfer.errors import InvalidUsage, NotAvailable, ProfileRefused
from kvxfer.tuning.profile import Profile, decode, encode
from kvxfer.whole_file import READABLE, write_whole

MAX_BYTES = 1 << 20


def default_path() -> Path:
    """Where `kvxfer tune` writes and transports look.

    Raises:
        NotAvailable: this user has no home.
    """
    home = config_home()
    if home is None:
        raise NotAvailable("no home for a tuning profile; name a file: --out, KVXFER_TUNING")
    return home / "kvxfer" / "tuning.json"


def read_profile(path: Path) -> Profile | None:
    """The profile in a file, whichever machine it is of; None where there is no file.

    Raises:
        ProfileRefused: it cannot be read, or is none.
    """
    try:
        data = _read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ProfileRefused(f"it cannot be read: {error.strerror}") from error
    return decode(data)


def _read(path: Path) -> bytes:
    # Not blocking: a FIFO would wait for somebody to write.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ProfileRefused("it is no regular file")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ProfileRefused(f"it has more than {MAX_BYTES} bytes, which no profile has")
    return data


def require_profile_path(path: Path) -> None:
    """Check before the measurement, not after it, that :func:`write_profile` can write there.

    Raises:
        InvalidUsage: it cannot; names the path and the cause.
    """
    try:
        path = path.resolve()
        if path.exists() and not path.is_file():
            raise InvalidUsage(f"cannot write {str(path)!r}: it is no regular file; name another")
        folder = next(one for one in path.absolute().parents if one.exists())
        with tempfile.TemporaryFile(dir=folder):  # as root all seems writable, in /proc nothing is
            pass
    except OSError as error:
        raise InvalidUsage(f"cannot write {str(path)!r}: {error.strerror}") from error


def write_profile(path: Path, profile: Profile) -> None:
    """Write ``profile``, whole or not at all; folders are made.

    Raises:
        InvalidUsage: it cannot be written; names the path and the cause.
    """
    write_whole(path.resolve(), encode(profile).encode(), mode=READABLE, make_folders=True)
