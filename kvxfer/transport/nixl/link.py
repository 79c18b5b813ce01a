"""The side that posts."""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec
import numpy as np

from kvxfer.errors import (
    InvalidUsage,
    KvxferError,
    PeerLost,
    ProtocolMismatch,
    TransferFailed,
    TransferTimeout,
)
from kvxfer.layout import CopyPlan
from kvxfer.layout.copy_plan import CopyBox
from kvxfer.transport.base import Op, Transfer
from kvxfer.transport.device_copy import default_num_sms
from kvxfer.transport.network_link import Carried, NetworkLink
from kvxfer.transport.nixl import pieces, wire
from kvxfer.transport.nixl.agent import Agent
from kvxfer.transport.nixl.conversation import Conversation, Far
from kvxfer.transport.nixl.memory import Range, Rows
from kvxfer.transport.nixl.prepared import Prepared
from kvxfer.transport.nixl.reach import Reach
from kvxfer.transport.nixl.slots import ABANDONED, StagedRows
from kvxfer.transport.nixl.staging import SlotShape, Staging, place_of
from kvxfer.transport.nixl.wire import Kind
from kvxfer.tuning import Section

# Rows of this many bytes or more travel by themselves. In host memory: measured on one host, where
# NIXL's UCX copies from process to process, and over TCP. In device memory UCX takes some 3 us for
# each, in which NVLink carries a mebibyte; still to be measured.
_HOST_DIRECT_BYTES = {"auto": 8 << 10, "direct": 1, "staged": 1 << 63}
_DEVICE_DIRECT_BYTES = _HOST_DIRECT_BYTES | {"auto": 1 << 20}
_MAX_DESCRIPTORS = 16 << 10
_MAX_POST_BYTES = 256 << 20
_OPS = {Op.PUT: "WRITE", Op.GET: "READ"}
# Given up in the middle, a link lets what is under way end first: a GPU's copies do so in
# milliseconds, those to a peer that hangs do not.
_SETTLE_S = 0.5
_GO_ON_S = 5e-3  # of each look at one that was given up: NIXL goes on only meanwhile
_LOOK_S = 1e-3
_log = logging.getLogger(__name__)


class NixlLink(NetworkLink):
    """A link between two agents."""

    transport = "nixl"
    _is_closed = True  # until it has something to give back

    def __init__(
        self,
        agent: Agent,
        far: Far,
        hello: Callable[[], wire.Hello],
        near: Sequence[Range],
        reach: Reach,
        *,
        device: int,
        num_threads: int,
        section: Section,
        stall_s: float,
        connect_s: float,
        undo: ExitStack,
    ) -> None:
        """Connect, and run ``undo`` once closed, or where that fails.

        Args:
            agent: of this side.
            far: the peer.
            hello: makes what this side says first.
            near: what NIXL knows of this side's pages; rows elsewhere go through slots.
            reach: where the slots of GPUs are.
            device: the CUDA device of this side's pages; -1 for host memory.
            num_threads: of this side's copies in host memory.
            section: what the profile says of it.
            stall_s: how long a transfer may stand still.
            connect_s: how long the peer may take to answer.
            undo: what this link gives back.

        Raises:
            PeerLost: the peer is gone, or does not answer within ``connect_s``.
        """
        super().__init__(device, stall_s, section, num_threads)
        self._undo = undo
        self._agent, self._far, self._near = agent, far, tuple(near)
        self._reach = reach
        self.direct_bytes = _DEVICE_DIRECT_BYTES if reach.name else _HOST_DIRECT_BYTES
        self.physical_limit_gb_per_s = reach.limit_gb_per_s
        self._is_broken = self._has_left = False
        self._talk = Conversation(agent, far, stall_s)
        self._staged_rows: StagedRows | None = None
        self._moving: Prepared | None = None  # of rows in place
        self._is_closed = False
        self.region_addresses = np.array([one.address for one in far.regions], np.uint64)
        self.region_bytes = [one.num_bytes for one in far.regions]
        self.path = f"nixl {agent.backend}" + (reach.name and f" by {reach.name}")
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
        shape = SlotShape(welcome.num_slots, welcome.slot_bytes)
        place = place_of(self.device, in_device=self._reach.in_device)
        self.slots = shape.as_slots(place)
        staging = Staging(self._agent, place, shape, device=self.device, num_threads=num_threads)
        far_bytes = shape.num_slots * shape.slot_bytes
        far_slots = Range(welcome.address, far_bytes, welcome.device)
        self._staged_rows = StagedRows(self._agent, self._far, self._talk, staging, far_slots)
        self._sequence = welcome.sequence

    def require_open(self) -> None:
        """Check the peer's process where it is on this host, and whether it has said farewell."""
        if self._is_closed:  # who leaves a peer still asks whether it lives
            self._far.require_alive()
        elif self._lock.acquire(blocking=False):  # a transfer under way sees it by itself
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

    def _copy(self, plan: CopyPlan, op: Op, direct_bytes: int, num_sms: int) -> Carried:
        self._require_open()
        direct, staged = self._share(plan, op, direct_bytes)
        number = self._sequence + 1
        is_begun = False
        try:
            self._talk.ask(Kind.BEGIN, Kind.GO, number)
            is_begun = True
            if staged:
                assert self._staged_rows is not None
                self._staged_rows.move(plan, op, staged, number=number, num_sms=num_sms)
            if direct:
                self._move_direct(plan, op, direct)
            self._talk.ask(Kind.FINISH, Kind.DONE, number)
        except BaseException as error:
            # Halfway through a transfer nothing else can follow.
            if is_begun or not isinstance(error, ProtocolMismatch):
                self._break()
            raise
        is_gpu = self.device >= 0 and bool(staged)
        return Carried(
            f"{self.path}, {_OPS[op]}{self._through(direct, staged)}",
            (num_sms or default_num_sms(plan)) if is_gpu else 0,
        )

    def _through(self, direct: list[CopyBox], staged: list[CopyBox]) -> str:
        """What a GPU's rows went through, for the path."""
        if not self._reach.name or not staged:
            return ""
        slots = "device slots" if self._reach.in_device else "host slots"
        return f", {slots} and rows in place" if direct else f", {slots}"

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
            is_long = is_long and self._far.in_place
            # What NIXL does not know here may pass through a slot.
            is_long = is_long and pieces.is_inside(
                plan, box, source=not far_is_source, regions=self._near
            )
            (direct if is_long else staged).append(box)
        return direct, staged

    # Rows in place.

    def _move_direct(self, plan: CopyPlan, op: Op, boxes: list[CopyBox]) -> None:
        devices = (self.device, self._far.regions[0].device)
        for box in boxes:
            sides = (
                pieces.runs_of(plan, box, source=op is Op.PUT),
                pieces.runs_of(plan, box, source=op is Op.GET),
            )
            # A post moves or has stalled as a whole, so that it must not be too long.
            count = max(1, min(_MAX_DESCRIPTORS, _MAX_POST_BYTES // box.run_bytes))
            for at in range(0, sides[0].size, count):
                near, far = (
                    Rows(side[at : at + count], box.run_bytes, device)
                    for side, device in zip(sides, devices, strict=True)
                )
                moving = self._moving = self._agent.prepare(_OPS[op], near, self._far.name, far)
                moving.post()
                self._talk.wait(moving.poll)
                self._release_moving()

    def _release_moving(self) -> None:
        moving, self._moving = self._moving, None
        if moving is not None and not moving.release():
            ABANDONED.append((moving, self._undo.pop_all()))

    # The end.

    def _break(self) -> None:
        """Refuse from now on, and leave the peer as soon as nothing moves any more."""
        if self._is_broken:
            return
        self._is_broken = True
        if self._staged_rows is not None:
            self._staged_rows.stop(self._stall_s)
        if not self._settle(_SETTLE_S):
            self.given_up = _GivenUp(self)
            ABANDONED.append(self)  # also where nobody else keeps it

    def _settle(self, timeout_s: float) -> bool:
        """Wait until nothing moves any more, and leave the peer then.

        Before that nothing is given back and nothing is told: NIXL writes also what it has
        cancelled, and the peer would take its pages for free.
        """
        if self._has_left:
            return True
        end_s = time.monotonic() + timeout_s
        while not self._is_settled():
            if time.monotonic() >= end_s:
                return False
            time.sleep(_LOOK_S)
        self._leave()
        return True

    def _is_settled(self) -> bool:
        rows = self._moving is None or self._moving.is_settled()
        slots = self._staged_rows is None or self._staged_rows.is_settled()
        return rows and slots

    def _leave(self) -> None:
        self._has_left = True
        self.given_up = None
        if self in ABANDONED:
            ABANDONED.remove(self)
        self._release_moving()
        slots, self._staged_rows = self._staged_rows, None
        self._talk.leave(is_over=slots is None or slots.close())

    def is_over(self, timeout_s: float) -> bool:
        """Wait until the peer's pages are written no more by a link that was given up."""
        with self._lock:
            if not self._settle(timeout_s) and not self._far.has_ended:
                return False
            self.given_up = None
            return True

    def close(self) -> None:
        """Refuse later transfers, wait for one that runs, and end the connection.

        Raises:
            TransferTimeout: one that was given up still moves; nothing was given back, and closing
                again waits again.
        """
        if self._agent.is_inherited:
            return
        with self._lock:
            if self._is_closed:
                return
            self._break()
            if self._settle(_SETTLE_S):
                self._undo.close()
            elif not self._far.has_ended:
                raise TransferTimeout(
                    f"a transfer with process {self._far.pid} was given up and has not ended; keep "
                    "both sides' pages, and close again once the peer goes on or is gone"
                )
            self._is_closed = True

    def __del__(self) -> None:
        """Keep all that a link holds which was dropped unclosed: this may not wait for its end."""
        if self._is_closed or self._agent.is_inherited:
            return
        ABANDONED.append((self._moving, self._staged_rows, self._undo.pop_all()))
        if not sys.is_finalizing():
            _log.warning(
                "a link to process %d was dropped unclosed; its slots and the registration of its "
                "pages stay until this process ends",
                self._far.pid,
            )


class _GivenUp(Transfer):
    """What a link was given up with, for as long as it moves; it delivers nothing."""

    num_bytes = sequence = 0

    def __init__(self, link: NixlLink) -> None:
        self._link = link
        self.actual_path = link.path

    def poll(self, timeout_s: float) -> bool:
        """Let it go on; raises once it has ended."""
        if not self._link.is_over(max(timeout_s, _GO_ON_S)):
            return False
        raise TransferFailed(f"a transfer over {self.actual_path} was given up; send it again")
