"""The names of an endpoint's connections."""

import itertools
import os
import threading

from kvxfer.errors import InvalidUsage


class ConnectionNames:
    """Which connection names are in use, by the incarnation of the far endpoint.

    The first connection to an endpoint has the incarnation of this side as its name, a further one
    that is open at the same time ``incarnation#2`` and so on: each name has a completion slot of
    its own over there. A name that was given back is used again, and its slot counts on.
    """

    def __init__(self, incarnation: str) -> None:
        """Names of the endpoint of that incarnation."""
        self._incarnation = incarnation
        self._met: dict[str, str] = {}  # address: the incarnation that was last found there
        self._used: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def propose(self, address: str) -> str:
        """A name that, as far as is known, is free at the endpoint behind ``address``.

        Raises:
            InvalidUsage: this process was forked off the one whose names these are.
        """
        if os.getpid() != self._pid:
            raise InvalidUsage(
                f"process {os.getpid()} was forked off {self._pid}, whose endpoint this is; make "
                "an endpoint or a sender in the process that uses it"
            )
        far = self._met.get(address, "")
        further = (f"{self._incarnation}#{number}" for number in itertools.count(2))
        names = itertools.chain([self._incarnation], further)
        return next(name for name in names if (far, name) not in self._used)

    def claim(self, address: str, far: str, name: str) -> bool:
        """Take ``name`` at the endpoint ``far``, which answered at ``address``; False if in use."""
        with self._lock:
            self._met[address] = far
            if (far, name) in self._used:
                return False
            self._used.add((far, name))
            return True

    def give_back(self, far: str, name: str) -> None:
        """Let another connection have the name."""
        # Without the lock: the garbage collector calls this too, in whatever it interrupts.
        self._used.discard((far, name))
