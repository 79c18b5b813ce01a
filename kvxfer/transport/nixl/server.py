"""The side that serves: a thread that takes messages, has copies made, and completes.

Copies of a GPU run beside it, on a stream a connection; the thread looks after them and answers
each once its bytes are visible. Nothing is said of a transfer's end, good or bad, before the last
of its copies is over, so that whoever hears it may use the pages for something else.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Sequence

import msgspec

from kvxfer.errors import (
    CudaError,
    InvalidUsage,
    KvxferError,
    NotAvailable,
    PeerLost,
    ProtocolMismatch,
    TransferFailed,
)
from kvxfer.memory.buffer import Buffer
from kvxfer.transport.board import Board
from kvxfer.transport.nixl import pieces, wire
from kvxfer.transport.nixl.agent import Agent
from kvxfer.transport.nixl.memory import HOST_DEVICE, Range
from kvxfer.transport.nixl.slots import ABANDONED
from kvxfer.transport.nixl.staging import Place, Staging, place_of, shape_of
from kvxfer.transport.nixl.waiting import Pause
from kvxfer.transport.nixl.wire import Kind, Message
from kvxfer.transport.process import ProcessSpec, ProcessWatch
from kvxfer.tuning import Section

_MAX_CONNECTIONS = 128
_MAX_DEVICE_BYTES = 8 << 30  # of slots in a GPU's memory
_WATCH_S = 0.2
_IDLE_S = 2e-3
_BUSY_S = 100e-6
_CLOSE_S = 30.0  # far above what the copies of all connections take
_log = logging.getLogger(__name__)


class _Connection:
    def __init__(
        self, name: str, hello: wire.Hello, staging: Staging, pages: list[Buffer], host: str
    ) -> None:
        self.name = name
        self.slot = hello.slot
        self.staging = staging
        self._pages = pages
        self.number = 0  # of the transfer under way; 0 = none
        self.is_cut_off = False  # a transfer was refused, of which the peer may still write
        self.busy: dict[int, Message] = {}  # slots that are copied, and what asked for it
        self.process = hello.process if hello.host == host else ProcessSpec.own()
        self.watch = ProcessWatch(hello.process.identity()) if hello.host == host else None

    @property
    def has_ended(self) -> bool:
        return self.watch is not None and self.watch.has_ended

    def end_transfer(self) -> None:
        """Wait for the copies of a transfer that is refused: they write to pages."""
        self.is_cut_off = self.is_cut_off or self.number > 0
        self.number = 0
        with contextlib.suppress(KvxferError):  # else the GPU has failed, and writes no more
            self.staging.copies.drain()
        self.busy.clear()

    def leave(self) -> Staging | None:
        """End it in order; its slots, unless their copies do not end."""
        try:
            self.staging.copies.rest()
        except KvxferError:
            self.close()
            return None
        self._unwatch()
        return self.staging

    def close(self) -> None:
        """Wait for its copies and give everything back."""
        _close(self.staging, self._pages)
        self._unwatch()

    def _unwatch(self) -> None:
        if self.watch is not None:
            self.watch.close()


class Server:
    """Serves regions of this process to peers that know its secret."""

    def __init__(
        self, agent: Agent, board: Board, num_threads: int, host: str, section: Section
    ) -> None:
        self.secret = secrets.token_bytes(wire.SECRET_BYTES)
        self._agent, self._board, self._host = agent, board, host
        self._num_threads, self._section = num_threads, section
        self._device = HOST_DEVICE
        self._regions: tuple[Range, ...] = ()
        self._kept: list[Buffer] = []
        self._connections: dict[bytes, _Connection] = {}
        # Of a connection that was left in order. The next one gets them as they are: a peer's NIXL
        # refuses another registration at an address that it knows.
        self._spare: Staging | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvxfer-nixl", daemon=True)
        self._thread.start()

    def add_region(self, buffer: Buffer) -> None:
        """Let peers reach a range, which is kept meanwhile; all are of one device."""
        self._kept.append(buffer)
        self._device = buffer.device
        self._regions = (*self._regions, Range(buffer.address, buffer.num_bytes, buffer.device))

    def close(self) -> bool:
        """Tell all peers and stop; may be called more than once, and waits the first time.

        False where copies did not end in time: pages, slots and the agent are used until they have,
        and whoever has them must keep them.
        """
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                _log.error(
                    "copies for peers did not end within %.0f s; the pages that they may use are "
                    "kept until this process ends",
                    _CLOSE_S,
                )
        if self._thread.is_alive():
            return False
        self._kept = []
        return True

    def _run(self) -> None:
        pause = Pause(_IDLE_S)
        watch_s = time.monotonic() + _WATCH_S
        try:
            while not self._stop.is_set():
                try:
                    self._agent.pump()
                except KvxferError:
                    return
                if self._go_on():
                    pause.reset()
                else:
                    pause.wait(_BUSY_S if self._is_busy else None)
                if time.monotonic() >= watch_s:
                    watch_s = time.monotonic() + _WATCH_S
                    self._drop_ended()
        finally:
            self._drop_all()

    @property
    def _is_busy(self) -> bool:
        return any(one.number for one in self._connections.values())

    def _go_on(self) -> bool:
        """Take what has come and answer what is over; whether there was any."""
        has_moved = self._answer_all()
        while (mail := self._agent.mail.take()) is not None:
            self._take(*mail)
            self._answer_all()
            has_moved = True
        return has_moved

    def _take(self, name: str, message: Message) -> None:
        connection = self._connections.get(message.connection)
        try:
            if message.kind is Kind.PARTED:
                self._parted(name)
            elif message.kind is Kind.HELLO:
                self._hello(name, message)
            elif connection is not None and connection.name == name:
                self._handle(connection, message)
        except (KvxferError, MemoryError, ValueError) as error:
            self._refuse(name, message, error)

    def _refuse(self, name: str, message: Message, error: Exception) -> None:
        _log.info("refused %s of %s: %s", message.kind.name, name, error)
        if isinstance(error, CudaError):  # of this side's GPU, while the peer's is sound
            error = TransferFailed(f"the GPU of process {ProcessSpec.own().pid}: {error}")
        body = msgspec.msgpack.encode(wire.Fail(type(error).__name__, str(error)[: wire.MAX_TEXT]))
        connection = self._connections.get(message.connection)
        if connection is not None and connection.name == name:
            connection.end_transfer()
        if connection is not None or message.kind is Kind.HELLO:
            with contextlib.suppress(PeerLost):
                self._agent.send(name, message._replace(kind=Kind.FAIL, body=body))

    def _hello(self, name: str, message: Message) -> None:
        hello = wire.read_body(message, wire.Hello)
        if not secrets.compare_digest(hello.secret, self.secret):
            return  # it has no business here, and no answer
        self._agent.know(name, hello.metadata, may_replace=False)
        if hello.version != wire.VERSION:
            raise ProtocolMismatch(
                f"the peer speaks version {hello.version} of the nixl transport, this side "
                f"{wire.VERSION}; use one version of kvxfer"
            )
        self._require_standing()
        if message.connection in self._connections or len(self._connections) >= _MAX_CONNECTIONS:
            raise ProtocolMismatch(
                f"{len(self._connections)} connections, or one of that name twice; the limit is "
                f"{_MAX_CONNECTIONS}"
            )
        self._take_over(hello.slot, name)
        staging = self._make_staging(hello)
        made = _Connection(name, hello, staging, self._kept, self._host)
        self._connections[message.connection] = made
        self._board.occupy(made.slot, made.process)
        welcome = wire.Welcome(
            staging.memory.address,
            staging.slot_bytes,
            staging.num_slots,
            staging.memory.device,
            self._board.sequence(made.slot),
            self._agent.metadata(staging.memory),
        )
        body = msgspec.msgpack.encode(welcome)
        self._agent.send(name, Message(message.connection, Kind.WELCOME, body=body))

    def _make_staging(self, hello: wire.Hello) -> Staging:
        place = place_of(self._device, in_device=hello.in_device)
        shape = shape_of(place, self._section)
        if place is Place.DEVICE:
            wanted = (len(self._connections) + 1) * shape.num_slots * shape.slot_bytes
            if wanted > _MAX_DEVICE_BYTES:
                raise NotAvailable(
                    f"{len(self._connections)} connections have their slots in the memory of GPU "
                    f"{self._device}; one more would pass {_MAX_DEVICE_BYTES} bytes"
                )
        spare, self._spare = self._spare, None
        if spare is not None:
            if spare.fits(place, shape):
                return spare
            _close(spare)
        return Staging(
            self._agent, place, shape, device=self._device, num_threads=self._num_threads
        )

    def _take_over(self, slot: int, name: str) -> None:
        """Make a slot of the board free of an agent's own earlier connection, and of no other.

        Only one whose agent is not reached any more goes too: it was closed and could not say so.
        """
        for key, one in list(self._connections.items()):
            if one.slot != slot:
                continue
            if one.name != name and self._reaches(one.name):
                raise PeerLost(
                    f"slot {slot} of the board is still another agent's, which has not left; "
                    "connect again on the control plane"
                )
            self._drop(key)

    def _reaches(self, name: str) -> bool:
        try:
            self._agent.send(name, Message(bytes(wire.ID_BYTES), Kind.LEAVE))  # no connection
        except PeerLost:
            return False
        return True

    def _handle(self, connection: _Connection, message: Message) -> None:
        kind = message.kind
        if kind is Kind.LEAVE:
            self._leave(message.connection)
            return
        self._require_standing()
        answer = message._replace(body=b"")
        if kind is Kind.BEGIN:
            if message.number != self._board.sequence(connection.slot) + 1:
                raise ProtocolMismatch(
                    f"transfer {message.number} begins; {self._board.sequence(connection.slot)} "
                    "was the last"
                )
            connection.number = message.number
            self._agent.send(connection.name, answer._replace(kind=Kind.GO))
            return
        if message.number == 0 or message.number != connection.number:
            return  # of a transfer that was refused
        if kind is Kind.FINISH:
            if connection.busy:
                raise ProtocolMismatch(f"the end of a transfer with {len(connection.busy)} slots")
            connection.number = 0
            self._board.complete(connection.slot, message.number)
            self._agent.send(connection.name, answer._replace(kind=Kind.DONE))
        elif kind in (Kind.SCATTER, Kind.GATHER):
            self._copy(connection, message)

    def _copy(self, connection: _Connection, message: Message) -> None:
        """Begin to scatter or gather a slot, once its pages were found inside what is served."""
        staging, slot, is_gather = connection.staging, message.slot, message.kind is Kind.GATHER
        if slot >= staging.num_slots or slot in connection.busy:
            raise ProtocolMismatch(f"a piece for slot {slot}, which is none or busy")
        piece = pieces.decode_half(message.body, source=is_gather)
        if not is_gather and piece.conversion != "none":
            raise ProtocolMismatch("a conversion on the way out of a slot")
        side = piece.as_plan()
        if piece.wire_bytes > staging.slot_bytes or not pieces.is_inside(
            side, piece.box, source=is_gather, regions=self._regions
        ):
            raise InvalidUsage(
                "the bytes of a piece do not lie in an exported region, or exceed its slot"
            )
        address = staging.slot_address(slot)
        staging.copies.start(slot, piece.gather(address) if is_gather else piece.scatter(address))
        connection.busy[slot] = message

    def _answer_all(self) -> bool:
        """Say which copies are over; whether any is."""
        return any([self._answer(one) for one in self._connections.values()])

    def _answer(self, connection: _Connection) -> bool:
        done = []
        try:
            done = [slot for slot in connection.busy if connection.staging.copies.is_done(slot)]
            for slot in done:
                answer = connection.busy.pop(slot)._replace(kind=Kind.SLOT, body=b"")
                self._agent.send(connection.name, answer)
        except KvxferError as error:
            if connection.busy:
                self._refuse(connection.name, next(iter(connection.busy.values())), error)
        return bool(done)

    def _require_standing(self) -> None:
        if self._board.is_withdrawn:
            raise _closed()

    def _parted(self, name: str) -> None:
        for key in [key for key, one in self._connections.items() if one.name == name]:
            self._drop(key)
        self._agent.forget(name)

    def _leave(self, key: bytes) -> None:
        # In the middle of a transfer, what the peer has posted may still reach the slots.
        one = self._connections[key]
        self._drop(key, keeps_slots=self._spare is None and not one.number and not one.is_cut_off)

    def _drop(self, key: bytes, *, keeps_slots: bool = False) -> None:
        connection = self._connections.pop(key)
        if keeps_slots:
            self._spare = connection.leave()
        else:
            connection.close()
        self._board.vacate(connection.slot)

    def _drop_ended(self) -> None:
        ended = {one.name for one in self._connections.values() if one.has_ended}
        for name in ended:
            self._parted(name)

    def _drop_all(self) -> None:
        for key, one in list(self._connections.items()):
            self._refuse(one.name, Message(key, Kind.FAIL), _closed())
            self._drop(key)
        if self._spare is not None:
            _close(self._spare)
            self._spare = None


def _close(staging: Staging, pages: Sequence[Buffer] = ()) -> None:
    try:
        staging.close()
    except KvxferError:
        _log.exception("the copies of a connection did not end; its slots and pages are kept")
        ABANDONED.append((staging, pages))


def _closed() -> PeerLost:
    return PeerLost(
        f"process {ProcessSpec.own().pid} has closed the cache of this link; connect again once "
        "it serves another"
    )
