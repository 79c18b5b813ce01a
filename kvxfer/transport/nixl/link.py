"""The side that posts."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec
import numpy as np

from kvxfer.errors import InvalidUsage, KvxferError, PeerLost, ProtocolMismatch, TransferTimeout
from kvxfer.layout import CopyPlan
from kvxfer.layout.copy_plan import CopyBox
from kvxfer.transport.base import Op
from kvxfer.transport.network_link import NetworkLink
from kvxfer.transport.nixl import pieces, wire
from kvxfer.transport.nixl.agent import Agent, Range
from kvxfer.transport.nixl.conversation import Conversation, Far
from kvxfer.transport.nixl.slots import ABANDONED, Slots
from kvxfer.transport.nixl.wire import Kind

# Rows of this many bytes or more travel by themselves: measured on one host, where NIXL's UCX
# copies from process to process, and over TCP.
_DIRECT_BYTES = {"auto": 8 << 10, "direct": 1, "staged": 1 << 63}
_MAX_DESCRIPTORS = 16 << 10
_MAX_POST_BYTES = 256 << 20
_OPS = {Op.PUT: "WRITE", Op.GET: "READ"}


class NixlLink(NetworkLink):
    """A link between two agents."""

    transport = "nixl"
    direct_bytes = _DIRECT_BYTES

    def __init__(
        self,
        agent: Agent,
        far: Far,
        hello: Callable[[], wire.Hello],
        near: Sequence[Range],
        *,
        num_threads: int,
        stall_s: float,
        connect_s: float,
        undo: ExitStack,
    ) -> None:
        """Connect, and run ``undo`` once closed, or where that fails.

        Raises:
            PeerLost: the peer is gone, or does not answer within ``connect_s``.
        """
        super().__init__()
        self._undo = undo
        self._agent, self._far, self._near = agent, far, tuple(near)
        self._is_broken = self._is_closed = False
        self._talk = Conversation(agent, far, stall_s)
        self._slots: Slots | None = None
        self.region_addresses = np.array([address for address, _ in far.regions], np.uint64)
        self.region_bytes = [num_bytes for _, num_bytes in far.regions]
        self.path = f"nixl {agent.backend}"
        try:
            self._talk.send(Kind.HELLO, body=msgspec.msgpack.encode(hello()))
            welcome = self._talk.hear(Kind.WELCOME, 0, connect_s)
            self._enter(wire.read_body(welcome, wire.Welcome), num_threads)
        except TransferTimeout as error:
            self.close()
            raise PeerLost(
                f"process {far.pid} does not answer within {connect_s} s; is its cache closed?"
            ) from error
        except BaseException:
            self.close()
            raise

    def _enter(self, welcome: wire.Welcome, num_threads: int) -> None:
        self._agent.know(self._far.name, welcome.metadata)
        self._slots = Slots(self._agent, self._far, self._talk, welcome, num_threads)
        self._sequence = welcome.sequence

    def require_open(self) -> None:
        """Check the peer's process where it is on this host, and whether it has said farewell."""
        if self._lock.acquire(blocking=False):  # a transfer under way sees it by itself
            try:
                self._require_open()
            finally:
                self._lock.release()

    def _require_open(self) -> None:
        if self._is_closed:
            raise InvalidUsage("this link is closed; connect again")
        if self._is_broken:
            self._far.require_alive()
            raise PeerLost(
                f"a transfer with process {self._far.pid} was given up, or it has closed the cache "
                "of this link; connect again"
            )
        try:
            self._talk.require_open()
        except KvxferError:
            self._break()
            raise

    def _copy(self, plan: CopyPlan, op: Op, direct_bytes: int) -> str:
        self._require_open()
        direct, staged = self._share(plan, op, direct_bytes)
        number = self._sequence + 1
        is_begun = False
        try:
            self._talk.ask(Kind.BEGIN, Kind.GO, number)
            is_begun = True
            if staged:
                assert self._slots is not None
                self._slots.move(plan, op, staged, number)
            if direct:
                self._move_direct(plan, op, direct)
            self._talk.ask(Kind.FINISH, Kind.DONE, number)
        except BaseException as error:
            # Halfway through a transfer nothing else can follow.
            if is_begun or not isinstance(error, ProtocolMismatch):
                self._break()
            raise
        return f"{self.path}, {'WRITE' if op is Op.PUT else 'READ'}"

    def _share(
        self, plan: CopyPlan, op: Op, direct_bytes: int
    ) -> tuple[list[CopyBox], list[CopyBox]]:
        """The boxes whose rows travel by themselves, and the others."""
        direct: list[CopyBox] = []
        staged: list[CopyBox] = []
        far_is_source = op is Op.GET
        for box in plan.boxes:
            if not box.num_pages:
                continue
            if not pieces.is_inside(plan, box, source=far_is_source, regions=self._far.regions):
                raise InvalidUsage(
                    "the far side's bytes of a plan do not lie in an exported region"
                )
            is_long = plan.conversion == "none" and box.run_bytes >= direct_bytes
            # What NIXL does not know here may pass through a slot.
            is_long = is_long and pieces.is_inside(
                plan, box, source=not far_is_source, regions=self._near
            )
            (direct if is_long else staged).append(box)
        return direct, staged

    # Rows in place.

    def _move_direct(self, plan: CopyPlan, op: Op, boxes: list[CopyBox]) -> None:
        for box in boxes:
            sides = (
                pieces.runs_of(plan, box, source=op is Op.PUT),
                pieces.runs_of(plan, box, source=op is Op.GET),
            )
            # A post moves or has stalled as a whole, so that it must not be too long.
            count = max(1, min(_MAX_DESCRIPTORS, _MAX_POST_BYTES // box.run_bytes))
            for at in range(0, sides[0].size, count):
                rows = []
                for side in sides:
                    part = side[at : at + count]
                    rows.append(np.zeros((part.size, 3), np.uint64))
                    rows[-1][:, 0], rows[-1][:, 1] = part, box.run_bytes
                prepared = self._agent.prepare(_OPS[op], rows[0], self._far.name, rows[1])
                try:
                    prepared.post()
                    self._talk.wait(prepared.poll)
                finally:
                    if not prepared.release():
                        ABANDONED.append((prepared, self._undo.pop_all()))

    # The end.

    def _break(self) -> None:
        """End the connection; the link refuses from now on."""
        if self._is_broken:
            return
        self._is_broken = True
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.close()
        self._talk.leave()

    def close(self) -> None:
        """Refuse later transfers, wait for one that runs, and end the connection."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._break()
            self._undo.close()

    def __del__(self) -> None:
        """A link that is dropped ends as one that is closed."""
        self.close()
