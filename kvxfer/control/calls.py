"""Many calls to many peers from one thread, none of which waits for another."""

import contextlib
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import zmq

from kvxfer.closing import Closing
from kvxfer.control import _sockets
from kvxfer.control._client_events import ClientEvents
from kvxfer.control._wake import Wake
from kvxfer.control.addresses import parse_url
from kvxfer.control.framing import decode, decoder_of, encode, encode_limit
from kvxfer.control.key import SharedKey
from kvxfer.control.messages import ErrorReply
from kvxfer.control.replies import error_of
from kvxfer.descriptors import limit_text
from kvxfer.errors import ControlTimeout, KvxferError, NotAvailable, PeerLost, ProtocolMismatch

# A server keeps 16 answers for a connection that does not read; with more calls at a time some
# could be lost.
_MAX_SENT = 16

Answer: TypeAlias = msgspec.Struct | KvxferError
OnAnswer: TypeAlias = Callable[[Answer], None]


@dataclass(slots=True)
class _Call:
    name: str
    parts: list[bytes]
    end_s: float
    limit_s: float
    on_answer: OnAnswer


class Line:
    """A connection to one channel of one peer; made by :meth:`Calls.open`."""

    def __init__(
        self,
        context: _sockets.Context,
        address: str,
        types: tuple[type[msgspec.Struct], ...],
        key: SharedKey | None,
    ) -> None:
        self.address = address
        self.on_lost: Callable[[], None] | None = None  # the connection has ended
        self._types: tuple[type[msgspec.Struct], ...] = (*types, ErrorReply)
        decoder_of(self._types)
        at = parse_url(address)
        with contextlib.ExitStack() as stack:  # whatever fails gives back what was opened
            self.socket = _sockets.open_client(context, ipv6=at.is_ipv6, key=key)
            stack.callback(self.socket.close, linger=0)
            self.events = ClientEvents(context, self.socket)
            stack.callback(self.events.close)
            self.socket.connect(at.url)
            stack.pop_all()
        self._nonce = os.urandom(8)
        self._counter = itertools.count(1)
        self._unsent: deque[_Call] = deque()
        self._took_s = 0.0  # when the connection took a call last
        self._sent: dict[bytes, _Call] = {}

    def start(self, message: msgspec.Struct, *, deadline_s: float, on_answer: OnAnswer) -> None:
        """Send ``message``, at most once; ``on_answer`` gets the answer or what went wrong.

        ``deadline_s`` is for the connection to take it, and again for the answer.
        It is called by :meth:`Calls.run`, once, unless the line is closed before.
        """
        call_id = self._nonce + next(self._counter).to_bytes(8, "big")
        end_s = time.monotonic() + deadline_s
        parts = [call_id, *encode(message)]
        self._unsent.append(_Call(type(message).__name__, parts, end_s, deadline_s, on_answer))
        self._send_waiting()

    @property
    def wants_to_send(self) -> bool:
        """Whether a call waits that may go as soon as the connection takes it."""
        return bool(self._unsent) and len(self._sent) < _MAX_SENT

    @property
    def end_s(self) -> float:
        """When the first of its calls is over at the latest; infinity for none."""
        return min((end_s for _, end_s in self._timed()), default=float("inf"))

    def work(self) -> bool:
        """Send what can be sent, and pass on what has come or is over.

        Returns:
            Whether the connection has ended since the last time. Its calls fail with `PeerLost`.
        """
        self._receive()  # an answer may have come just before the end
        if self.socket.closed:
            return False  # whoever got an answer has closed the line
        lost = self.events.drain()
        if lost:
            sent, self._sent = list(self._sent.values()), {}
            for call in sent:
                text = f"{self.address} ended the connection before it answered {call.name}"
                call.on_answer(PeerLost(f"{text}, whose outcome is unknown"))
        if self.events.is_final:
            self._end_refused()
        self._send_waiting()  # what was behind others is not late because they took their time
        self._end_late()
        self._send_waiting()
        return lost

    def close(self) -> None:
        """Forget all calls and disconnect; may be called more than once."""
        self._unsent.clear()
        self._sent.clear()
        if not self.socket.closed:
            self.events.close()
            self.socket.close(linger=0)

    def _end_refused(self) -> None:
        """What waits for a connection waits in vain."""
        while self._unsent:
            call = self._unsent.popleft()
            text = f"{call.name} to {self.address} was not sent: {self.events.refusal}"
            call.on_answer(NotAvailable(f"{text}; give both sides the same key"))

    def _end_late(self) -> None:
        now_s = time.monotonic()
        for call in [one for one, end_s in self._timed() if end_s <= now_s]:
            if self._sent.pop(call.parts[0], None) is not None:
                state = "sent, not answered; its outcome is unknown"
            elif call in self._unsent:
                self._unsent.remove(call)
                why = f" ({self.events.refusal})" if self.events.refusal else ""
                state = f"no connection{why}; nothing was sent"
            else:
                continue  # what another call was answered with has closed this line
            call.on_answer(
                ControlTimeout(
                    f"{call.name} to {self.address} is not done after {call.limit_s:g} s: {state}; "
                    "check that the peer lives"
                )
            )

    def _timed(self) -> Iterator[tuple[_Call, float]]:
        """The calls whose time runs, and its end: not of those that wait for others' answers."""
        for call in self._sent.values():
            yield call, call.end_s
        if self.wants_to_send:
            for call in self._unsent:
                yield call, max(call.end_s, self._took_s + call.limit_s)

    def _send_waiting(self) -> None:
        with contextlib.suppress(zmq.Again):
            while self.wants_to_send and not self.socket.closed:
                call = self._unsent[0]
                limit = encode_limit(call.limit_s)
                self.socket.send_multipart([*call.parts, limit], zmq.NOBLOCK)
                self._took_s = time.monotonic()
                call.end_s = self._took_s + call.limit_s
                self._sent[call.parts[0]] = self._unsent.popleft()
                self.events.forget()

    def _receive(self) -> None:
        while not self.socket.closed and _sockets.has_message(self.socket):
            parts = _sockets.receive_parts(self.socket)
            call = None if parts is None else self._sent.pop(parts[0], None)
            if parts is None or call is None:
                continue  # foreign, or the late answer to a call that timed out
            call.on_answer(self._read(call, parts))

    def _read(self, call: _Call, parts: list[bytes]) -> Answer:
        try:
            reply: msgspec.Struct = decode(parts[1:], self._types)
        except ProtocolMismatch as error:
            return ProtocolMismatch(f"answer of {self.address} to {call.name}: {error}")
        return error_of(reply, self.address) if isinstance(reply, ErrorReply) else reply


class Calls(Closing):
    """Lines to peers, and the loop that serves them. All methods but `wake` are of one thread."""

    def __init__(self, key: SharedKey | None = None) -> None:
        """No line yet; ``key`` is that of the servers, where they have one."""
        _sockets.require_libzmq()
        self._key = key
        self._context = _sockets.client_context.acquire()
        self._lines: list[Line] = []
        self._wake = Wake()

    @property
    def num_lines(self) -> int:
        """Lines that are open."""
        return len(self._lines)

    def open(self, address: str, *reply_types: type[msgspec.Struct]) -> Line:
        """A line to ``address``; the peer need not be there yet.

        Raises:
            InvalidUsage: a malformed address.
            NotAvailable: its host has no address, or this process has no descriptor left.
        """
        try:
            line = Line(self._context, address, reply_types, self._key)
        except zmq.ZMQError as error:
            raise NotAvailable(
                f"no socket for {address}: {error}; {limit_text()}", error.errno or 0
            ) from error
        self._lines.append(line)
        return line

    def drop(self, line: Line) -> None:
        """Close a line; its calls are not answered any more. Again, it changes nothing."""
        line.close()
        if line in self._lines:
            self._lines.remove(line)

    def run(self, timeout_s: float) -> None:
        """Wait until something comes, a call is over, `wake` is called or ``timeout_s`` passes."""
        end_s = min((line.end_s for line in self._lines), default=float("inf"))
        wait_s = max(0.0, min(timeout_s, end_s - time.monotonic()))
        poller = zmq.Poller()
        poller.register(self._wake.fileno(), zmq.POLLIN)
        for line in self._lines:
            poller.register(line.socket, zmq.POLLIN | (zmq.POLLOUT if line.wants_to_send else 0))
            poller.register(line.events.socket, zmq.POLLIN)
        # Rounded up: a wait that ends a little early would turn in circles.
        ready = poller.poll(math.ceil(wait_s * 1000))
        if any(where == self._wake.fileno() for where, _ in ready):
            self._wake.clear()
        for line in list(self._lines):
            if line in self._lines and line.work() and line.on_lost is not None:
                line.on_lost()

    def wake(self) -> None:
        """End a `run` in progress, or the next one, at once; from any thread."""
        self._wake.ring()

    def close(self) -> None:
        """Close all lines; once."""
        while self._lines:
            self._lines.pop().close()
        self._wake.close()
        _sockets.client_context.release(self._context)
