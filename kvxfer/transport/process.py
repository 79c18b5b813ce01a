"""Whether a peer's process has ended, with all its threads."""

import os
import select
from pathlib import Path

from kvxfer import _core
from kvxfer.closing import Closing
from kvxfer.errors import NotAvailable, PeerLost


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
        # After opening, because the id may have gone to a successor before.
        if _start_ticks(identity) != identity.start_ticks:
            self.close()

    @property
    def has_ended(self) -> bool:
        """Whether it has; False where that cannot be told, as in another pid namespace."""
        if self._fd < 0:
            return not self._lives()
        watch = select.poll()
        watch.register(self._fd, select.POLLIN)
        return bool(watch.poll(0))

    def close(self) -> None:
        """Stop watching; may be called more than once."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

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
