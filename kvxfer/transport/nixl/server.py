"""The side that serves: a thread that takes messages, scatters and gathers, and completes."""

import contextlib
import logging
import secrets
import threading
import time

import msgspec
import numpy as np

from kvxfer import _core
from kvxfer.errors import (
    InvalidUsage,
    KvxferError,
    NotAvailable,
    PeerLost,
    ProtocolMismatch,
)
from kvxfer.memory.buffer import Buffer
from kvxfer.transport.board import Board, ProcessSpec
from kvxfer.transport.host_copy import plan_tables
from kvxfer.transport.nixl import pieces, wire
from kvxfer.transport.nixl.agent import Agent, Pause, Range
from kvxfer.transport.nixl.staging import Staging
from kvxfer.transport.nixl.wire import Kind, Message
from kvxfer.transport.process import ProcessWatch

SLOT_BYTES = 2 << 20
NUM_SLOTS = 4
_MAX_CONNECTIONS = 128
_WATCH_S = 0.2
_IDLE_S = 2e-3
_BUSY_S = 100e-6
_log = logging.getLogger(__name__)


class _Connection:
    def __init__(self, name: str, hello: wire.Hello, staging: Staging, host: str) -> None:
        self.name = name
        self.slot = hello.slot
        self.staging = staging
        self.number = 0  # of the transfer under way; 0 = none
        self.process = hello.process if hello.host == host else ProcessSpec.own()
        self.watch = ProcessWatch(hello.process.identity()) if hello.host == host else None

    @property
    def has_ended(self) -> bool:
        return self.watch is not None and self.watch.has_ended

    def close(self) -> None:
        self.staging.close()
        if self.watch is not None:
            self.watch.close()


class Server:
    """Serves regions of this process to peers that know its secret."""

    def __init__(self, agent: Agent, board: Board, num_threads: int, host: str) -> None:
        self.secret = secrets.token_bytes(wire.SECRET_BYTES)
        self._agent, self._board, self._host = agent, board, host
        self._num_threads = num_threads
        self._pool: _core.WorkerPool | None = None
        self._regions: tuple[Range, ...] = ()
        self._kept: list[Buffer] = []
        self._connections: dict[bytes, _Connection] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvxfer-nixl", daemon=True)
        self._thread.start()

    def add_region(self, buffer: Buffer) -> None:
        """Let peers reach a range that the agent has registered, which is kept meanwhile."""
        self._kept.append(buffer)
        self._regions = (*self._regions, (buffer.address, buffer.num_bytes))

    def close(self) -> None:
        """Tell all peers and stop; nothing is scattered any more once this returns."""
        self._stop.set()
        self._thread.join()
        self._kept.clear()

    def _run(self) -> None:
        pause = Pause(_IDLE_S)
        watch_s = time.monotonic() + _WATCH_S
        try:
            while not self._stop.is_set():
                try:
                    self._agent.pump()
                except KvxferError:
                    return
                if self._take_all():
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

    def _take_all(self) -> bool:
        num_taken = 0
        while (mail := self._agent.mail.take()) is not None:
            num_taken += 1
            self._take(*mail)
        return num_taken > 0

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
        body = msgspec.msgpack.encode(wire.Fail(type(error).__name__, str(error)[: wire.MAX_TEXT]))
        connection = self._connections.get(message.connection)
        if connection is not None:
            connection.number = 0
        if connection is not None or message.kind is Kind.HELLO:
            with contextlib.suppress(PeerLost):
                self._agent.send(name, message._replace(kind=Kind.FAIL, body=body))

    def _hello(self, name: str, message: Message) -> None:
        hello = wire.read_body(message, wire.Hello)
        if not secrets.compare_digest(hello.secret, self.secret):
            return  # it has no business here, and no answer
        self._agent.know(name, hello.metadata)
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
        staging = Staging(self._agent, NUM_SLOTS, SLOT_BYTES)
        made = _Connection(name, hello, staging, self._host)
        self._connections[message.connection] = made
        self._board.occupy(made.slot, made.process)
        welcome = wire.Welcome(
            staging.address,
            SLOT_BYTES,
            NUM_SLOTS,
            self._board.sequence(made.slot),
            self._agent.metadata(staging.memory),
        )
        body = msgspec.msgpack.encode(welcome)
        self._agent.send(name, Message(message.connection, Kind.WELCOME, body=body))

    def _take_over(self, slot: int, name: str) -> None:
        """Make a slot of the board free of an agent's own earlier connection, and of no other."""
        for key in [key for key, one in self._connections.items() if one.slot == slot]:
            if self._connections[key].name != name:
                raise NotAvailable(
                    f"slot {slot} of the board is another peer's; connect on the control plane"
                )
            self._drop(key)

    def _handle(self, connection: _Connection, message: Message) -> None:
        kind = message.kind
        if kind is Kind.LEAVE:
            self._drop(message.connection)
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
            connection.number = 0
            self._board.complete(connection.slot, message.number)
            self._agent.send(connection.name, answer._replace(kind=Kind.DONE))
        elif kind in (Kind.SCATTER, Kind.GATHER):
            self._move(connection, message)
            self._agent.send(connection.name, answer._replace(kind=Kind.SLOT))

    def _move(self, connection: _Connection, message: Message) -> None:
        """Scatter or gather a slot, once all of it was found inside what is served."""
        staging, slot = connection.staging, message.slot
        if slot >= staging.num_slots or message.num_bytes > pieces.TABLE_BYTES:
            raise ProtocolMismatch(f"{message.num_bytes} bytes of tables in slot {slot}")
        start = slot * staging.slot_bytes
        # A copy: the peer can still write to the slot.
        plan = pieces.decode_tables(staging.bytes[start : start + message.num_bytes].tobytes())
        from_slot = message.kind is Kind.SCATTER
        first = pieces.data_offset(message.num_bytes)
        rows = [(first, staging.slot_bytes - first)]
        box = plan.boxes[0]
        if from_slot and plan.conversion != "none":
            raise ProtocolMismatch("a conversion on the way out of a slot")
        for source in (True, False):
            regions = rows if source == from_slot else self._regions
            if not pieces.is_inside(plan, box, source=source, regions=regions):
                raise InvalidUsage(
                    "the bytes of a piece do not lie in an exported region, or in its slot"
                )
        planes = plan.src_planes if from_slot else plan.dst_planes
        planes += np.uint64(staging.slot_address(slot))
        _core.paged_copy_host(self._workers, plan_tables(plan), False)

    @property
    def _workers(self) -> _core.WorkerPool:
        if self._pool is None:
            self._pool = _core.WorkerPool(self._num_threads)
        return self._pool

    def _require_standing(self) -> None:
        if self._board.is_withdrawn:
            raise _closed()

    def _parted(self, name: str) -> None:
        for key in [key for key, one in self._connections.items() if one.name == name]:
            self._drop(key)
        self._agent.forget(name)

    def _drop(self, key: bytes) -> None:
        connection = self._connections.pop(key)
        self._board.vacate(connection.slot)
        connection.close()

    def _drop_ended(self) -> None:
        ended = {one.name for one in self._connections.values() if one.has_ended}
        for name in ended:
            self._parted(name)

    def _drop_all(self) -> None:
        for key, one in list(self._connections.items()):
            self._refuse(one.name, Message(key, Kind.FAIL), _closed())
            self._drop(key)
        self._pool = None


def _closed() -> PeerLost:
    return PeerLost(
        f"process {ProcessSpec.own().pid} has closed the cache of this link; connect again once "
        "it serves another"
    )
