"""From NIXL's lists to copies: whose they are, how they are reached, and what carries them."""

import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvxfer import _core
from kvxfer.closing import Closing
from kvxfer.connectors.nixl_agent.facts import AgentFacts
from kvxfer.connectors.nixl_agent.lanes import Copy, DeviceLane, HostLane, Lane
from kvxfer.connectors.nixl_agent.ledger import Ledger, Standing
from kvxfer.connectors.nixl_agent.remote_agent import HOST_DEVICE, Reach, RemoteAgent, reach_of
from kvxfer.errors import InvalidUsage, NotAvailable, RegistrationError
from kvxfer.memory import MemoryKind


class LeftToNixl(NotAvailable):
    """A transfer is NIXL's; the message is the reason, the same whenever it is that one."""


OWN_NAMES = ("NIXL_INIT_AGENT", "")


class Prepared(NamedTuple):
    """A list as copies by one GPU, or by threads, take it.

    Attributes:
        descriptors: the native list.
        standing: whether the registrations under it stand.
        reach: what keeps its memory mapped.
    """

    descriptors: _core.DescriptorList
    standing: Standing
    reach: Reach


class ListSide:
    """The descriptors of one list.

    Attributes:
        rows: uint64 ``[n, 3]``: address, bytes, NIXL's device id, which is the same in all.
        kind: of their memory.
        device: NIXL's device id.
        peer: whose they are; None = this agent's.
    """

    def __init__(
        self, rows: NDArray[np.uint64], kind: MemoryKind, peer: RemoteAgent | None
    ) -> None:
        self.rows, self.kind, self.peer = rows, kind, peer
        self.device = int(rows[0, 2])
        self._prepared: dict[int, Prepared] = {}
        self._lock = threading.Lock()

    def on(self, device: int, ledger: Ledger) -> Prepared:
        """The list for copies by that GPU, or by threads (-1); made once.

        Raises:
            KvxferError: its memory is not reached so, and why.
        """
        with self._lock:
            found = self._prepared.get(device)
            if found is None:
                found = self._prepared[device] = self._prepare(device, ledger)
        return found

    def _prepare(self, device: int, ledger: Ledger) -> Prepared:
        if self.peer is None:
            regions = ledger.regions(self.kind, self.device)
            reach = reach_of(regions, [0] * len(regions))
        else:
            reach = self.peer.reach(self.kind, self.device, device)
        descriptors = _core.DescriptorList(self.rows, reach.ranges)
        used = [reach.regions[at] for at in descriptors.ranges_used]
        words = ledger.words if self.peer is None else self.peer.words
        if device != HOST_DEVICE:
            descriptors.place_on(device)
        return Prepared(descriptors, Standing(words, used), reach)


class Pairing(Closing):
    """What one agent has and knows. All methods may be called from several threads."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._peers: dict[str, RemoteAgent] = {}
        self._lanes: dict[int, Lane] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()

    # Peers.

    def meet(self, name: str, facts: AgentFacts | None) -> None:
        """Note what an agent's metadata says of it now; None = it is a stock agent.

        Raises:
            KvxferError: the agent is not reached directly, and why.
        """
        with self._lock:
            known = self._peers.get(name)
            if known is not None and facts is not None and known.is_same(facts):
                known.learn(facts)
                return
            self._forget(name)
            if facts is not None:
                self._peers[name] = RemoteAgent(name, facts)

    def forget(self, name: str) -> None:
        """An agent was removed: what was prepared for it ends."""
        with self._lock:
            self._forget(name)

    def _forget(self, name: str) -> None:
        known = self._peers.pop(name, None)
        if known is not None:
            known.close()

    # Lists and transfers.

    def side(self, name: str, kind: MemoryKind, rows: NDArray[np.uint64]) -> ListSide:
        """A list of agent ``name``, ready for copies as far as it is known what will copy.

        Raises:
            KvxferError: transfers of it are NIXL's, and why.
        """
        peer = None if name in OWN_NAMES else self._peers.get(name)
        if peer is None and name not in OWN_NAMES:
            raise LeftToNixl("peers that are stock agents, or not of this host")
        if rows.shape[0] == 0 or (rows[:, 2] != rows[0, 2]).any():
            raise LeftToNixl("lists of several devices")
        side = ListSide(rows, kind, peer)
        device = self._copying_device(side)
        if device is not None:
            side.on(device, self.ledger)
        return side

    def _copying_device(self, side: ListSide) -> int | None:
        """Who will copy a list: threads (-1), or a GPU of this process; None = not known yet."""
        if side.kind is MemoryKind.HOST:
            return HOST_DEVICE
        if side.peer is None:
            return side.device
        spans = self.ledger.spans()
        own = {span.device for span in spans if span.kind is MemoryKind.DEVICE}
        return own.pop() if len(own) == 1 else None

    def copy_of(
        self, sides: Sequence[ListSide], indices: Sequence[NDArray[np.int64]], *, writes: bool
    ) -> tuple[Copy, Lane, RemoteAgent]:
        """A transfer of chosen descriptors.

        Args:
            sides: this agent's list and a peer's.
            indices: int64 ``[n]`` into either.
            writes: whether the peer's memory is the destination.

        Raises:
            KvxferError: it is NIXL's, and why.
        """
        near, far = sides
        peer = far.peer
        if near.peer is not None or peer is None or near.kind is not far.kind:
            raise LeftToNixl("transfers within one agent, or between host and device memory")
        device = HOST_DEVICE if near.kind is MemoryKind.HOST else near.device
        ready = [side.on(device, self.ledger) for side in sides]
        ends: list[Any] = [(ready[at].descriptors, indices[at]) for at in (0, 1)]
        plan = _core.ListPlan(*(ends[0] + ends[1] if writes else ends[1] + ends[0]))

        def require_sound() -> None:
            peer.require_alive()
            if not all(one.standing for one in ready):
                raise RegistrationError(
                    f"memory of a transfer with {peer.name} is no longer registered"
                )

        pid = ready[1].reach.attached_pid
        copy = Copy(plan, attached_pid=pid, writes=writes, require_sound=require_sound)
        return copy, self._lane(device), peer

    def _lane(self, device: int) -> Lane:
        with self._lock:
            lane = self._lanes.get(device)
            if lane is None:
                lane = HostLane() if device == HOST_DEVICE else DeviceLane(device)
                self._lanes[device] = lane
            return lane

    def close(self) -> None:
        """Wait for copies that run, and withdraw all memory; may be called more than once."""
        if os.getpid() != self._pid:
            return  # a forked child: agent, copies and memory are its parent's
        for closing in (*self._lanes.values(), *self._peers.values(), self.ledger):
            closing.close()


def every(side: ListSide) -> NDArray[np.int64]:
    """The indices of all descriptors."""
    return np.arange(side.rows.shape[0], dtype=np.int64)


def require_integers(indices: Any) -> NDArray[np.int64]:
    """Indices as int64 ``[n]``.

    Raises:
        InvalidUsage: they are no row of integers.
    """
    found = np.asarray(indices)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise InvalidUsage("indices that are no integers")
    return np.ascontiguousarray(found, np.int64)
