"""The transport: what it exports, and how it links."""

import hashlib
import ipaddress
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from kvxfer.errors import InvalidUsage, NotAvailable, PeerLost, ProtocolMismatch
from kvxfer.memory import KVCache, MemoryKind, Registration
from kvxfer.memory.buffer import Buffer
from kvxfer.transport.base import Availability, Capabilities, Export, Link, Transport
from kvxfer.transport.board import Board, ProcessSpec, decode_spec, slot_of
from kvxfer.transport.host_copy import default_num_threads
from kvxfer.transport.nixl import wire
from kvxfer.transport.nixl.agent import Agent, Range, load_api
from kvxfer.transport.nixl.conversation import Far
from kvxfer.transport.nixl.link import NixlLink
from kvxfer.transport.nixl.server import Server
from kvxfer.transport.process import ProcessWatch

_SEAL_BYTES = 16
_LOOPBACK = {"engine_config": "NET_DEVICES=lo"}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_Address = Annotated[int, msgspec.Meta(gt=0, le=(1 << 63) - 1)]
_Size = Annotated[int, msgspec.Meta(gt=0, lt=1 << 46)]


class _RegionSpec(msgspec.Struct, frozen=True):
    process: ProcessSpec
    host: Annotated[str, msgspec.Meta(max_length=64)]
    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    backend: Annotated[str, msgspec.Meta(max_length=64)]
    is_loopback: bool
    secret: Annotated[
        bytes, msgspec.Meta(min_length=wire.SECRET_BYTES, max_length=wire.SECRET_BYTES)
    ]
    address: _Address
    num_bytes: _Size
    metadata: Annotated[bytes, msgspec.Meta(min_length=1, max_length=wire.MAX_METADATA_BYTES)]

    @property
    def peer(self) -> tuple[object, ...]:
        """What all regions of a peer have in common."""
        fields = (self.process, self.host, self.agent, self.backend, self.is_loopback)
        return (*fields, self.secret)


class _Sealed(msgspec.Struct, frozen=True):
    seal: Annotated[bytes, msgspec.Meta(min_length=_SEAL_BYTES, max_length=_SEAL_BYTES)]
    region: bytes


def _seal(region: bytes) -> bytes:
    return hashlib.blake2b(region, digest_size=_SEAL_BYTES).digest()


def _open_sealed(data: bytes) -> _RegionSpec:
    """A region's metadata: NIXL would take damaged bytes for addresses."""
    sealed = decode_spec(data, _Sealed)
    if not secrets.compare_digest(_seal(sealed.region), sealed.seal):
        raise ProtocolMismatch(f"{len(data)} bytes of metadata do not fit their seal")
    return decode_spec(sealed.region, _RegionSpec)


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
    capabilities = Capabilities(frozenset({MemoryKind.HOST}), cross_process=True)

    def __init__(
        self,
        num_threads: int | None = None,
        *,
        backend: str = "UCX",
        params: Mapping[str, str] | None = None,
        stall_s: float = 20.0,
        connect_s: float = 10.0,
    ) -> None:
        """Start NIXL at the first use.

        Args:
            num_threads: threads that gather and scatter, the caller's included; None = all CPUs,
                at most 8.
            backend: the plug-in, the same on both sides. It must move host memory and carry
                notifications.
            params: of the plug-in, in place of the defaults.
            stall_s: how long a transfer may stand still before it is given up, with its link.
            connect_s: how long a peer may take to answer.
        """
        self._num_threads = default_num_threads() if num_threads is None else num_threads
        self._backend, self._params = backend, None if params is None else dict(params)
        self._stall_s, self._connect_s = stall_s, connect_s
        self._bind_host = "127.0.0.1"
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
        try:
            ipaddress.ip_address(bind_host)
        except ValueError as error:
            raise InvalidUsage(f"nixl takes a numeric address, not {bind_host!r}") from error
        self._board = board
        self._bind_host = bind_host

    def export(self, registration: Registration) -> Export:
        """Serve a range of host memory to peers that know its metadata."""
        buffer = registration.buffer
        _require_host_memory(buffer.device)
        if self._board is None:
            raise InvalidUsage("nixl exports nothing before it was told its board; call serve")
        memory = (buffer.address, buffer.num_bytes)
        agent = self._use_agent()
        try:
            agent.register(memory)
            if self._server is None:
                self._server = Server(agent, self._board, self._num_threads, _host_id())
            self._server.add_region(buffer)
            spec = _RegionSpec(
                ProcessSpec.own(),
                _host_id(),
                agent.name,
                self._backend,
                self._is_loopback,
                self._server.secret,
                *memory,
                agent.metadata(memory),
            )
        except BaseException:
            self._leave_agent()
            raise
        region = msgspec.msgpack.encode(spec)
        sealed = msgspec.msgpack.encode(_Sealed(_seal(region), region))
        return _NixlExport(sealed, partial(self._withdraw, memory))

    def _withdraw(self, memory: Range) -> None:
        # With one region gone nothing may be written any more, and peers hold all or none.
        assert self._agent is not None
        if self._server is not None:
            self._server.close()
            self._server = None
        self._agent.deregister(memory)
        self._leave_agent()

    def link(self, cache: KVCache, regions: Sequence[bytes], board: bytes) -> Link:
        """Connect to the peer that serves ``regions``."""
        _require_host_memory(cache.device)
        specs = [_open_sealed(region) for region in regions]
        process, slot = slot_of(board)
        far = _common_peer(specs)
        if far.process != process:
            raise ProtocolMismatch("the regions and the board name different processes")
        self._require_reachable(far)
        near = [one.buffer for one in cache.registrations]
        return self._link(specs, near, slot)

    def _link(self, specs: Sequence[_RegionSpec], near: Sequence[Buffer], slot: int) -> Link:
        far = specs[0]
        is_here = far.host == _host_id()
        with ExitStack() as undo:
            watch = None
            if is_here:
                watch = undo.enter_context(ProcessWatch(far.process.identity()))
                if watch.has_ended:
                    raise PeerLost(f"process {far.process.pid} ended; connect again")
            agent = self._use_agent()
            undo.callback(self._leave_agent)
            if far.agent == agent.name:
                raise NotAvailable("nixl does not link an endpoint to itself; use loopback")
            for spec in specs:
                agent.know(spec.agent, spec.metadata)
            ranges = [(buffer.address, buffer.num_bytes) for buffer in near]
            for memory, buffer in zip(ranges, near, strict=True):
                agent.register(memory)
                undo.callback(_deregister, agent, memory, buffer)
            peer = Far(
                far.agent,
                far.process.pid,
                tuple((spec.address, spec.num_bytes) for spec in specs),
                watch,
            )

            def hello() -> wire.Hello:
                return wire.Hello(
                    wire.VERSION,
                    far.secret,
                    slot,
                    ProcessSpec.own(),
                    _host_id(),
                    agent.metadata(),
                )

            return NixlLink(
                agent,
                peer,
                hello,
                ranges,
                num_threads=self._num_threads,
                stall_s=self._stall_s,
                connect_s=self._connect_s,
                undo=undo.pop_all(),
            )

    @property
    def _is_loopback(self) -> bool:
        return ipaddress.ip_address(self._bind_host).is_loopback

    def _use_agent(self) -> Agent:
        with self._lock:
            return self._count_user()

    def _count_user(self) -> Agent:
        if self._agent is None:
            params = self._params
            if params is None:
                params = _LOOPBACK if self._is_loopback and self._backend == "UCX" else {}
            self._agent = Agent(self._backend, params)
        self._num_users += 1
        return self._agent

    def _leave_agent(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0 and self._agent is not None:
                self._agent.close()
                self._agent = None

    def _require_reachable(self, far: _RegionSpec) -> None:
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


def _host_id() -> str:
    """Which start of which host this is; process ids say nothing elsewhere."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _deregister(agent: Agent, memory: Range, kept: Buffer) -> None:
    """End a registration; until then ``kept`` stays, which a transfer may write to."""
    agent.deregister(memory)


def _require_host_memory(device: int) -> None:
    if device >= 0:
        raise NotAvailable(
            f"nixl moves host memory; this is on CUDA device {device}, and staging in device "
            "memory is not built: use the nvlink transport"
        )


def _common_peer(specs: Sequence[_RegionSpec]) -> _RegionSpec:
    if len({spec.peer for spec in specs}) != 1:
        raise ProtocolMismatch(
            f"{len(specs)} regions of {len({spec.peer for spec in specs})} servers; a peer sends "
            "its own, at least one"
        )
    return specs[0]
