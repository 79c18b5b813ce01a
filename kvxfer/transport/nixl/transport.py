"""The transport: what it exports, and how it links."""

import ipaddress
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from kvxfer import _core
from kvxfer.errors import InvalidUsage, NotAvailable, ProtocolMismatch
from kvxfer.ip import unmapped
from kvxfer.memory import KVCache, MemoryKind, Registration
from kvxfer.memory.buffer import Buffer
from kvxfer.transport import tuned
from kvxfer.transport.base import Availability, Capabilities, Export, Link, Transport
from kvxfer.transport.board import Board, slot_of
from kvxfer.transport.host_copy import choose_num_threads
from kvxfer.transport.network_libraries import nixl_library
from kvxfer.transport.nixl import wire
from kvxfer.transport.nixl.agent import Agent
from kvxfer.transport.nixl.api import load_api
from kvxfer.transport.nixl.conversation import Far
from kvxfer.transport.nixl.link import NixlLink
from kvxfer.transport.nixl.memory import Range
from kvxfer.transport.nixl.reach import Reach, Side, has_rdma, maps_directly, reach
from kvxfer.transport.nixl.region import RegionSpec, common_peer, open_sealed, seal
from kvxfer.transport.nixl.server import Server
from kvxfer.transport.nixl.slots import ABANDONED
from kvxfer.transport.process import ProcessSpec, ProcessWatch
from kvxfer.tuning import Section

_LOOPBACK = {"engine_config": "NET_DEVICES=lo"}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_log = logging.getLogger(__name__)


class _NixlExport(Export):
    def __init__(self, metadata: bytes, withdraw: Callable[[], None]) -> None:
        self.metadata = metadata
        self._withdraw: Callable[[], None] | None = withdraw

    def close(self) -> None:
        withdraw, self._withdraw = self._withdraw, None
        if withdraw is not None:
            withdraw()


class NixlTransport(Transport):
    """Transfers by NIXL."""

    name = "nixl"
    capabilities = Capabilities(frozenset(MemoryKind), cross_process=True, crosses_hosts=True)

    def __init__(
        self,
        num_threads: int | None = None,
        *,
        backend: str = "UCX",
        params: Mapping[str, str] | None = None,
        in_device: bool | None = None,
        stall_s: float = 20.0,
        connect_s: float = 10.0,
    ) -> None:
        """Start NIXL at the first use.

        Args:
            num_threads: threads that gather and scatter, the caller's included; None = the measured
                best.
            backend: the plug-in, the same on both sides. It must move host memory, or with
                ``in_device`` that of GPUs, and carry notifications.
            params: of the plug-in, in place of the defaults.
            in_device: of two GPUs, whether rows pass through slots in their memory, or in pinned
                host memory; None = the first where a direct path is found. The side that posts
                decides.
            stall_s: how long a transfer may stand still before it is given up, with its link.
            connect_s: how long a peer may take to answer.
        """
        self._num_threads = num_threads
        self._backend, self._params = backend, None if params is None else dict(params)
        self._in_device = in_device
        self._stall_s, self._connect_s = stall_s, connect_s
        self._bind_host, self._is_loopback = "127.0.0.1", True
        self._board: Board | None = None
        self._agent: Agent | None = None
        self._num_users = 0  # exports and links
        self._lock = threading.Lock()
        self._server: Server | None = None

    @classmethod
    def probe(cls) -> Availability:
        """Whether NIXL is installed and loads."""
        try:
            load_api()
        except NotAvailable as error:
            return Availability(False, str(error))
        return Availability(True)

    def serve(self, board: Board, bind_host: str) -> None:
        """Complete on ``board``; a loopback ``bind_host`` keeps UCX to the loopback device."""
        self._is_loopback = _is_loopback(bind_host)
        self._board = board
        self._bind_host = bind_host

    def export(self, registration: Registration) -> Export:
        """Serve a range of memory to peers that know its metadata."""
        buffer = registration.buffer
        if self._board is None:
            raise InvalidUsage("nixl exports nothing before it was told its board; call serve")
        agent = self._use_agent(buffer.device)
        memory = Range(buffer.address, buffer.num_bytes, buffer.device)
        in_place = _is_known_in_place(memory)
        with ExitStack() as undo:
            undo.callback(self._leave_agent)
            if in_place:
                agent.register(memory)
                undo.callback(agent.deregister, memory)
            if self._server is None:
                section = _section(buffer.device)
                num_threads = choose_num_threads(self._num_threads, section)
                self._server = Server(agent, self._board, num_threads, _host_id(), section)
            self._server.add_region(buffer)
            own = self._side(buffer.device)
            spec = RegionSpec(
                process=ProcessSpec.own(),
                host=_host_id(),
                agent=agent.name,
                backend=self._backend,
                is_loopback=self._is_loopback,
                secret=self._server.secret,
                device=memory.device,
                device_uuid=own.device_uuid,
                rdma=own.rdma,
                in_place=in_place,
                address=memory.address,
                num_bytes=memory.num_bytes,
                metadata=agent.metadata(memory if in_place else None),
            )
            return _NixlExport(seal(spec), partial(self._withdraw, self._server, undo.pop_all()))

    def _withdraw(self, server: Server, undo: ExitStack) -> None:
        # With one region gone nothing may be written any more, and peers hold all or none.
        if self._server is server:
            self._server = None
        if server.close():
            undo.close()
        else:
            ABANDONED.append((server, undo))

    def link(self, cache: KVCache, regions: Sequence[bytes], board: bytes) -> Link:
        """Connect to the peer that serves ``regions``."""
        specs = [open_sealed(region) for region in regions]
        process, slot = slot_of(board)
        far = common_peer(specs)
        if far.process != process:
            raise ProtocolMismatch("the regions and the board name different processes")
        self._require_reachable(far)
        near = [one.buffer for one in cache.registrations]
        return self._link(specs, near, slot)

    def _link(self, specs: Sequence[RegionSpec], near: Sequence[Buffer], slot: int) -> Link:
        far, device = specs[0], near[0].device
        with ExitStack() as undo:
            undo.callback(_let_go, near)  # the first: a transfer may write there until the end
            watch = None
            if far.host == _host_id():
                watch = undo.enter_context(ProcessWatch(far.process.identity()))
                watch.require_alive()
            agent = self._use_agent(device)
            undo.callback(self._leave_agent)
            if far.agent == agent.name:
                raise NotAvailable("nixl does not link an endpoint to itself; use loopback")
            found = self._reach(far, device)
            in_place = found.in_device or not found.name
            undo.enter_context(agent.linked(far.agent))
            for spec in specs:
                agent.know(spec.agent, spec.metadata)
            section = _section(device)
            peer = Far(
                far.agent,
                far.process.pid,
                tuple(spec.memory for spec in specs),
                in_place and all(spec.in_place for spec in specs),
                watch,
            )

            def hello() -> wire.Hello:
                return wire.Hello(
                    wire.VERSION,
                    far.secret,
                    slot,
                    ProcessSpec.own(),
                    _host_id(),
                    found.in_device,
                    agent.metadata(),
                )

            return NixlLink(
                agent,
                peer,
                hello,
                _register_all(agent, near, undo) if peer.in_place else (),
                found,
                device=device,
                num_threads=choose_num_threads(self._num_threads, section),
                section=section,
                stall_s=self._stall_s,
                connect_s=self._connect_s,
                undo=undo.pop_all(),
            )

    def _reach(self, far: RegionSpec, device: int) -> Reach:
        found = reach(self._side(device), far.side, one_host=far.host == _host_id(), device=device)
        if self._in_device is not None and device >= 0 and far.device >= 0:
            name = "device memory" if self._in_device else "pinned host memory"
            return Reach(self._in_device, f"{name}, as asked")
        if found.problem:
            _log.warning(
                "nixl: rows between this process and process %d pass through %s: %s",
                far.process.pid,
                found.name,
                found.problem,
            )
        return found

    def _side(self, device: int) -> Side:
        uuid = "" if device < 0 else _core.device_info(device).uuid
        rdma = device >= 0 and has_rdma() and not self._is_loopback
        return Side(uuid, rdma, ProcessSpec.own().pid_namespace)

    def _use_agent(self, device: int) -> Agent:
        with self._lock:
            if self._agent is None:
                self._agent = Agent(self._backend, self._plug_in_params, device)
            if self._agent.device != device:
                raise InvalidUsage(
                    f"memory of CUDA device {device} with an endpoint of device "
                    f"{self._agent.device} (-1 is the host); give each an endpoint of its own"
                )
            self._num_users += 1
            return self._agent

    @property
    def _plug_in_params(self) -> Mapping[str, str]:
        if self._params is not None:
            return self._params
        return _LOOPBACK if self._is_loopback and self._backend == "UCX" else {}

    def _leave_agent(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0 and self._agent is not None:
                self._agent.close()
                self._agent = None

    def _require_reachable(self, far: RegionSpec) -> None:
        if far.backend != self._backend:
            raise NotAvailable(
                f"the peer serves NIXL's {far.backend}, this side is set to {self._backend}; use "
                "one plug-in on both"
            )
        if far.is_loopback != self._is_loopback:
            raise NotAvailable(
                f"this side is bound to {self._bind_host} and the peer "
                f"{'is' if far.is_loopback else 'is not'} on loopback; bind both to addresses of "
                "one network (Endpoint(bind_host=...))"
            )


def _is_loopback(host: str) -> bool:
    """Whether only this host reaches the address, which may be an IPv4 one written as IPv6."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError as error:
        raise InvalidUsage(f"nixl takes a numeric address, not {host!r}") from error
    return unmapped(ip).is_loopback


def _section(device: int) -> Section:
    """What the profile says of memory of a CUDA device; -1 = of the host."""
    memory = "private" if device < 0 else "device"
    return tuned.section(NixlTransport.name, memory, library=lambda: nixl_library().version)


def _host_id() -> str:
    """Which start of which host this is; process ids say nothing elsewhere."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _is_known_in_place(memory: Range) -> bool:
    """Whether NIXL is told of pages themselves, not of slots alone."""
    return memory.device < 0 or maps_directly(memory.address)


def _register_all(agent: Agent, near: Sequence[Buffer], undo: ExitStack) -> tuple[Range, ...]:
    """This side's pages as far as NIXL can be told of them."""
    ranges = [Range(one.address, one.num_bytes, one.device) for one in near]
    known = tuple(memory for memory in ranges if _is_known_in_place(memory))
    for memory in known:
        agent.register(memory)
        undo.callback(agent.deregister, memory)
    return known


def _let_go(kept: Sequence[Buffer]) -> None:
    """Hold on to memory until this is called."""
