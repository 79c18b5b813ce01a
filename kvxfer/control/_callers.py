"""Who is connected to a channel, and who has gone.

A ROUTER does not say that a connection has ended. Its monitor does, but knows the connection by
descriptor only, and a descriptor may be another connection's by then. So an event raises a
suspicion against the callers that were heard on that descriptor, and an empty message to each
settles it: libzmq refuses one to a caller that is gone. A living caller ignores it.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import zmq

from kvxfer.control._monitor import Monitor
from kvxfer.control._sockets import Context, Socket

# libzmq says that a connection ends before its socket has heard so.
_PROBES_S = (0.02, 0.2, 1.0)
_MAX_CALLERS = 4096
_MAX_NAMES = 64  # connections of one caller over one socket


@dataclass(slots=True)
class _Caller:
    descriptor: int
    names: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Gone:
    """A caller that is gone, and the incarnations for which nobody else has spoken."""

    routing_id: bytes
    names: tuple[str, ...]


class Callers:
    """The callers of one ROUTER; used by the server's thread alone."""

    def __init__(self, context: Context, socket: Socket) -> None:
        """Watch ``socket``, which is not bound yet."""
        self._socket = socket
        self.monitor = Monitor(context, socket, zmq.EVENT_DISCONNECTED)
        self._callers: dict[bytes, _Caller] = {}
        self._by_descriptor: dict[int, list[bytes]] = {}
        self._speakers: Counter[str] = Counter()  # callers that have spoken for an incarnation
        self._suspects: dict[bytes, tuple[float, int]] = {}  # when to probe, and how often so far

    def __len__(self) -> int:
        return len(self._callers)

    def heard(self, frame: zmq.Frame, routing_id: bytes, name: str) -> None:
        """A message has come from ``routing_id``, which spoke for incarnation ``name`` or ``""``.

        Args:
            frame: the frame of the routing id as it was received.
            routing_id: its bytes.
            name: empty if the message names none.
        """
        caller = self._callers.get(routing_id)
        if caller is None:
            caller = self._meet(frame, routing_id)
        if name and name not in caller.names and len(caller.names) < _MAX_NAMES:
            caller.names.add(name)
            self._speakers[name] += 1

    def note_events(self) -> None:
        """Suspect whom the monitor has seen going."""
        for _, descriptor in self.monitor.drain():
            for routing_id in self._by_descriptor.get(descriptor, ()):
                self._suspect(routing_id)

    @property
    def next_probe_s(self) -> float:
        """When the next suspicion is to be settled; infinity for none."""
        return min((due_s for due_s, _ in self._suspects.values()), default=float("inf"))

    def take_gone(self, now_s: float) -> Iterator[Gone]:
        """Those of the suspects that are gone."""
        for routing_id, (due_s, num_probes) in list(self._suspects.items()):
            if due_s > now_s:
                continue
            if not self._is_connected(routing_id):
                yield self.forget(routing_id)
            elif num_probes + 1 < len(_PROBES_S):
                due_s = now_s + _PROBES_S[num_probes + 1]
                self._suspects[routing_id] = (due_s, num_probes + 1)
            else:
                del self._suspects[routing_id]

    def forget(self, routing_id: bytes) -> Gone:
        """It is gone: sending to it has failed."""
        self._suspects.pop(routing_id, None)
        caller = self._callers.pop(routing_id, None)
        if caller is None:
            return Gone(routing_id, ())
        same = self._by_descriptor[caller.descriptor]
        same.remove(routing_id)
        if not same:
            del self._by_descriptor[caller.descriptor]
        self._speakers.subtract(caller.names)
        silent = tuple(name for name in sorted(caller.names) if not self._speakers[name])
        for name in silent:
            del self._speakers[name]
        return Gone(routing_id, silent)

    def _meet(self, frame: zmq.Frame, routing_id: bytes) -> _Caller:
        descriptor = int(frame.get(zmq.SRCFD))
        # Two connections do not have one descriptor, so an earlier one has ended unheard.
        for earlier in self._by_descriptor.get(descriptor, ()):
            self._suspect(earlier)
        if len(self._callers) >= _MAX_CALLERS:
            self._suspect(next(iter(self._callers)))
        self._by_descriptor.setdefault(descriptor, []).append(routing_id)
        caller = self._callers[routing_id] = _Caller(descriptor)
        return caller

    def _suspect(self, routing_id: bytes) -> None:
        self._suspects.setdefault(routing_id, (time.monotonic() + _PROBES_S[0], 0))

    def _is_connected(self, routing_id: bytes) -> bool:
        try:
            self._socket.send_multipart([routing_id, b""], zmq.NOBLOCK)
        except zmq.Again:
            return True  # it does not read, but it is there
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True
