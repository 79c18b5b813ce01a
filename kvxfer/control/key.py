"""The key that workers share: who holds it may call, and nobody else reads along.

The cryptography is libzmq's CURVE. All workers hold one CURVE secret; a server admits a client
whose long-term key is the same one. So one file is all there is to hand out.
"""

import hmac
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

import zmq
from zmq.utils import z85

from kvxfer.errors import InvalidUsage, NotAvailable

_KEY_CHARS = 40  # 32 bytes in Z85
_MAX_FILE_BYTES = 1024


class SharedKey:
    """A secret out of a file. It has no repr, no pickle and no comparison that would show it.

    Attributes:
        path: the file that it came from, for messages.
    """

    __slots__ = ("_public", "_secret", "path")

    def __init__(self, secret: bytes, path: Path) -> None:
        """Use :meth:`read` or :meth:`create`."""
        self.path = path
        self._secret = secret
        self._public = zmq.curve_public(secret)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "SharedKey":
        """Read the key in ``path``.

        Raises:
            InvalidUsage: the file cannot be read, is open to group or others, or holds no key.
            NotAvailable: this libzmq is built without CURVE.
        """
        _require_curve()
        where = _file(path)
        try:
            # What is checked is what is read: one descriptor, no second look at the path.
            with where.open("rb") as file:
                _require_private(os.fstat(file.fileno()), where)
                text = file.read(_MAX_FILE_BYTES + 1).strip()
        except OSError as error:
            raise InvalidUsage(f"key file {where} cannot be read: {error.strerror}") from error
        if len(text) != _KEY_CHARS:
            raise InvalidUsage(
                f"key file {where} holds {len(text)} characters, a key has {_KEY_CHARS}; make one "
                f"with kvxfer key (SharedKey.create)"
            )
        try:
            return cls(text, where)
        except (zmq.ZMQError, ValueError):
            # Without the cause, which may quote what is in the file.
            raise InvalidUsage(
                f"key file {where} holds no Z85 text; make one with kvxfer key (SharedKey.create)"
            ) from None

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> "SharedKey":
        """Make a new key and write it to ``path``, which only this user can read.

        Raises:
            InvalidUsage: the file exists already or cannot be written.
            NotAvailable: this libzmq is built without CURVE.
        """
        _require_curve()
        where = _file(path)
        secret = zmq.curve_keypair()[1]
        try:
            descriptor = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as error:
            raise InvalidUsage(
                f"key file {where} cannot be made, for it exists; use it as it is, or name another"
            ) from error
        except OSError as error:
            raise InvalidUsage(f"key file {where} cannot be made: {error.strerror}") from error
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret + b"\n")
        return cls(secret, where)

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """Make a server's socket ask for this key; `Gate` then judges the callers."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"kvxfer")

    def present(self, socket: "zmq.Socket[bytes]") -> None:
        """Make a client's socket prove this key and expect it of the server."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)

    def admits(self, public: bytes) -> bool:
        """Whether ``public``, 32 bytes, is of a holder of this key; in constant time."""
        return hmac.compare_digest(public, z85.decode(self._public))

    def __repr__(self) -> str:
        return f"SharedKey({str(self.path)!r})"

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise InvalidUsage(f"{self!r} does not travel; pass the path and read it there")


def _file(path: str | os.PathLike[str]) -> Path:
    if not os.fspath(path):
        raise InvalidUsage("the path of the key file is empty; name a file")
    return Path(path)


def _require_curve() -> None:
    if not zmq.has("curve"):
        raise NotAvailable(
            "this libzmq is built without CURVE (libsodium), so keys cannot be used; install "
            "pyzmq's wheel, or keep the channels on loopback"
        )


def _require_private(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise InvalidUsage(f"key file {path} is not a regular file; give the file of the key")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise InvalidUsage(
            f"key file {path} has mode {mode:04o}, so others than its owner reach it; "
            f"run chmod 600 on it, and make a new key if it was read"
        )
