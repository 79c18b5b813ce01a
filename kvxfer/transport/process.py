"""Which process a peer is, and whether it has ended, with all its threads."""

import os
import select
import weakref
from pathlib import Path
from typing import Annotated

import msgspec

from kvxfer import _core
from kvxfer.closing import Closing
from kvxfer.errors import NotAvailable, PeerLost


class ProcessSpec(msgspec.Struct, frozen=True):
    """A process on the wire: see ``csrc/memory/process.hpp``."""

    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    start_ticks: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    pid_namespace: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

    @classmethod
    def own(cls) -> "ProcessSpec":
        """This process."""
        identity = _core.process_identity()
        return cls(identity.pid, identity.start_ticks, identity.pid_namespace)

    def identity(self) -> _core.ProcessIdentity:
        """The core's form of it."""
        return _core.ProcessIdentity(self.pid, self.start_ticks, self.pid_namespace)

    def require_alive(self) -> None:
        """Check that the process is the one that was met.

        Raises:
            PeerLost: it ended, or its id now belongs to another.
            NotAvailable: it lives in another pid namespace.
        """
        _core.require_same_process(self.identity())


class ProcessWatch(Closing):
    """Watches one process of this host.

    A process that was killed counts as ended once its last thread is gone: only then can no store
    of it come any more.
    """

    def __init__(self, identity: _core.ProcessIdentity) -> None:
        """Watch the process of that identity, which may have ended already."""
        self._identity = identity
        self._fd = -1
        try:
            if _core.process_identity().pid_namespace != identity.pid_namespace:
                return  # a process of that id here is another one
            self._fd = os.pidfd_open(identity.pid)
        except (AttributeError, OSError, NotAvailable):
            return
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        self._close_fd.atexit = False  # threads that look until then would take it for the end
        # After opening, because the id may have gone to a successor before.
        if _start_ticks(identity) != identity.start_ticks:
            self.close()

    @property
    def has_ended(self) -> bool:
        """Whether it has; False where that cannot be told, as in another pid namespace."""
        if self._fd < 0:
            return not self._lives()
        # Reading /proc costs more than a small transfer, a poll next to nothing.
        watch = select.poll()
        watch.register(self._fd, select.POLLIN)
        return bool(watch.poll(0))

    def require_alive(self) -> None:
        """Check that it has not ended.

        Raises:
            PeerLost: it has, or its id belongs to another process.
        """
        if self.has_ended:
            raise PeerLost(
                f"process {self._identity.pid} ended; connect again once another serves in its "
                "place"
            )

    def close(self) -> None:
        """Stop watching; may be called more than once."""
        if self._fd >= 0:
            self._fd = -1
            self._close_fd()

    def _lives(self) -> bool:
        try:
            _core.require_same_process(self._identity)
        except PeerLost:
            return False
        except NotAvailable:
            pass
        return True


def _start_ticks(identity: _core.ProcessIdentity) -> int:
    """When the process of that id began, also one whose main thread has ended before the others.

    0 where there is none; where that cannot be told, what ``identity`` says.
    """
    try:
        # Behind the program's name in brackets, which may itself hold spaces and brackets.
        fields = Path(f"/proc/{identity.pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except OSError:
        return identity.start_ticks  # above all no free descriptor: whoever lives must not be freed
    return int(fields[19])
