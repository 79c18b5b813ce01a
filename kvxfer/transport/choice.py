"""Which transport carries the bytes to a peer, and what is said where that is not the fastest one.

A transport that is asked for by name is taken, or is an error. With ``auto`` both sides have
several, and the one that connects offers them to the other in the order of their measured speed
(:mod:`kvxfer.transport.registry`); to a peer of another host, those that cross hosts alone. What
does not reach the peer after all, say because the kernel denies access to its memory or two GPUs
have no peer access, is offered no more, and the next is tried. Where the bytes then go over a
network from one process of a host to another, a warning says so and why; with ``strict`` that is an
error.
"""

import logging
import threading

from kvxfer.errors import KvxferError, NotAvailable, ProtocolMismatch, VerificationError
from kvxfer.memory import MemoryKind
from kvxfer.transport.base import Transport
from kvxfer.transport.board import Board, slot_of
from kvxfer.transport.registry import TRANSPORTS, candidates, create_transport

_log = logging.getLogger(__name__)


def slow_path(name: str, path: str) -> str:
    """Why ``path``, as a link or a transfer of ``name`` says it, is not what the name stands for.

    Empty where it is.
    """
    if name == "nvlink" and path.startswith("pcie"):
        return f"the two GPUs share no NVLink: {path} carries the bytes"
    return ""


class Transports:
    """The transports of one endpoint or sender, each made when it is first needed. Thread-safe.

    Attributes:
        names: fastest first; one, unless ``auto`` was asked for.
        beyond_host: those of ``auto`` that reach other hosts too, fastest first.
        is_auto: whether it was.
        strict: whether a slower path than the expected one is an error.
        first: the fastest that works here.
    """

    def __init__(
        self,
        asked: str | Transport,
        *,
        memory: MemoryKind,
        board: Board,
        bind_host: str,
        num_threads: int | None = None,
        strict: bool = False,
    ) -> None:
        """Make the first of them.

        Args:
            asked: a name, ``auto``, or a transport with settings of its own.
            memory: of this side's cache.
            board: where peers complete.
            bind_host: where a transport listens that does.
            num_threads: threads of host copies; None = the measured best.
            strict: make a slower path than the expected one an error.

        Raises:
            InvalidUsage: no such name, or a host that the transport cannot listen on.
            NotAvailable: none of them works here, and why.
        """
        self._memory, self._num_threads = memory, num_threads
        self._board, self._bind_host = board, bind_host
        self._lock = threading.Lock()
        self._made: dict[str, Transport] = {}
        self.strict = strict
        self.is_auto = asked == "auto"
        if isinstance(asked, Transport):
            asked.serve(board, bind_host)
            self._made[asked.name] = asked
            self.names: tuple[str, ...] = (asked.name,)
        else:
            self.names = candidates(memory) if self.is_auto else (asked,)
        self.beyond_host = candidates(memory, beyond_host=True) if self.is_auto else ()
        self.first = self._first()

    def get(self, name: str) -> Transport:
        """The one of that name.

        Raises:
            NotAvailable: it does not work here, and why.
        """
        with self._lock:
            if name not in self._made:
                made = create_transport(name, memory=self._memory, num_threads=self._num_threads)
                made.serve(self._board, self._bind_host)
                self._made[name] = made
            return self._made[name]

    def _first(self) -> Transport:
        reasons = []
        for name in self.names:
            try:
                return self.get(name)
            except NotAvailable as error:
                reasons.append(str(error))
        raise NotAvailable("; ".join(reasons))


class TransportOffers:
    """What is offered to one peer until something reaches it.

    Attributes:
        names: fastest first.
    """

    def __init__(self, transports: Transports, *, is_here: bool, peer: str) -> None:
        """To the peer that is called ``peer``; ``is_here`` where its address is of this host."""
        self._transports = transports
        self._is_here = is_here
        self._peer = peer
        self._failures: list[str] = []
        self._is_told = False
        self.names = list(transports.names)
        if transports.is_auto and not is_here:
            self.names = list(transports.beyond_host)

    def get(self, name: str) -> Transport:
        """The transport that the peer has chosen.

        Raises:
            ProtocolMismatch: it was not offered.
            NotAvailable: it does not work here.
        """
        if name not in self.names:
            raise ProtocolMismatch(
                f"{self._peer} chose transport {name!r:.80} of {', '.join(self.names)}"
            )
        return self._transports.get(name)

    def drop(self, name: str, error: NotAvailable) -> None:
        """Offer ``name`` no more, which does not reach the peer.

        Raises:
            NotAvailable: ``error``, where nothing else is left, with what failed before.
            VerificationError: ``strict``, and it should have reached it.
        """
        self.names.remove(name)
        if not self.names:
            raise self.exhausted(error)
        self._failures.append(f"{name}: {error}")
        if self._transports.strict and not _crosses_hosts(name):
            self._complain(f"{name} does not reach {self._peer}: {error}")

    def exhausted(self, error: KvxferError) -> KvxferError:
        """What is raised where ``error`` is the last: with what failed before, if anything did."""
        if not self._failures or not isinstance(error, NotAvailable):
            return error
        tried = "; ".join([*self._failures, str(error)])
        return NotAvailable(f"nothing reaches {self._peer}; {tried}")

    def took(self, name: str, path: str, board: bytes) -> None:
        """Judge the path that reaches the peer, whose completion board is described by ``board``.

        Raises:
            VerificationError: ``strict``, and it is a slower one than the peer's place allows.
        """
        reason = ""
        if self._transports.is_auto or self._transports.strict:
            reason = slow_path(name, path) or self._why_unexpected(name, board)
        if reason and not self._is_told:
            self._complain(reason)
            self._is_told = True

    def _why_unexpected(self, name: str, board: bytes) -> str:
        fastest = self._transports.names[0]
        if not self._transports.is_auto or not _crosses_hosts(name) or _crosses_hosts(fastest):
            return ""
        carries = f"{name} carries the bytes to {self._peer}"
        if not self._is_here:
            if not _runs_here(board):
                return ""
            return (
                f"{carries}, which is a process of this host; {fastest} would be faster: use an "
                "address of this host, or ask for it by name"
            )
        if self._failures:
            return f"{carries}, because {'; '.join(self._failures)}"
        return f"{carries}, which does not serve {fastest}"

    def _complain(self, reason: str) -> None:
        if self._transports.strict:
            raise VerificationError(f"{reason} (strict: that is an error)")
        _log.warning("%s", reason)


def _crosses_hosts(name: str) -> bool:
    kind = TRANSPORTS.get(name)
    return kind is None or kind.capabilities.crosses_hosts


def _runs_here(board: bytes) -> bool:
    """Whether the process of a board is seen from here; ids alone are no proof, its start is."""
    try:
        slot_of(board)[0].require_alive()
    except KvxferError:
        return False
    return True
