"""`ucx`: peers on other hosts, over what UCX finds: TCP, RDMA.

Pages in a GPU's memory pass through slots in pinned host memory, which the GPU fills and empties
itself; so UCX needs to know nothing of CUDA.

The endpoint listens, and a thread of its own takes what peers send: long rows straight into their
place, others through registered slots, gathered on one side and scattered on the other
(``csrc/ucx/wire.hpp``). It checks every address against the regions that are exported here and
completes on the board itself, so that a peer maps nothing and needs no address of this process's.

UCX listens wherever its settings let it, and trusts whoever reaches its ports: over TCP it writes
where a peer's packet says. An endpoint that is bound to a loopback address, the default, keeps UCX
to the loopback device; bind to another address on networks alone whose hosts may all write to this
process.
"""

import importlib.util
import ipaddress
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from kvxfer import _core
from kvxfer.errors import InvalidUsage, KvxferError, NotAvailable, ProtocolMismatch
from kvxfer.ip import IpAddress, unmapped
from kvxfer.layout import CopyPlan
from kvxfer.memory import KVCache, MemoryKind, Registration
from kvxfer.memory.buffer import Buffer
from kvxfer.memory.wire import Address, NumBytes
from kvxfer.transport import tuned
from kvxfer.transport.base import (
    Availability,
    Capabilities,
    Export,
    Link,
    Op,
    Transport,
)
from kvxfer.transport.board import (
    NUM_SLOTS,
    WITHDRAWN_SLOT,
    Board,
    decode_spec,
    slot_of,
)
from kvxfer.transport.host_copy import choose_num_threads, plan_tables
from kvxfer.transport.network_link import Carried, NetworkLink
from kvxfer.transport.process import ProcessSpec
from kvxfer.tuning import Place, Section, Slots

_SECRET_BYTES = 16
_SLICE_S = 0.2
_LOOPBACK_DEVICE = "lo"
# Over TCP UCX would pass a rendezvous through buffers on both sides, at half the rate.
_DEFAULTS = (("RNDV_SCHEME", "put_zcopy"),)
# Rows of this many bytes or more travel by themselves; 0 = the measured best.
_DIRECT_BYTES = {"auto": 0, "direct": 1, "staged": (1 << 64) - 1}
# Of a GPU, whose bus and the network are slower than a copy in host memory; still to be measured.
_DEVICE_SLOT_BYTES = 8 << 20
# Of transfers that UCX could not end: it may still write there.
_ABANDONED: list[object] = []


class _ServerSpec(msgspec.Struct, frozen=True):
    process: ProcessSpec
    host: Annotated[str, msgspec.Meta(min_length=2, max_length=45)]
    port: Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]
    secret: Annotated[bytes, msgspec.Meta(min_length=_SECRET_BYTES, max_length=_SECRET_BYTES)]


class _RegionSpec(msgspec.Struct, frozen=True):
    server: _ServerSpec
    address: Address
    num_bytes: NumBytes
    on_device: bool


def library_candidates() -> list[str]:
    """Where UCX may be, in the order of trying: the system's, which may know verbs and CUDA, first.

    The other is that of the ``libucx`` package, which finds its modules beside itself.
    """
    found = importlib.util.find_spec("libucx")
    folders = found.submodule_search_locations if found else None
    return ["libucp.so.0", *(str(Path(one) / "lib" / "libucp.so.0") for one in folders or ())]


def _load() -> str:
    return _core.ucx_load(library_candidates())


def _parse_host(host: str) -> IpAddress:
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError as error:
        raise InvalidUsage(f"ucx takes a numeric address, not {host!r}") from error
    if parsed.is_unspecified:
        raise InvalidUsage(f"ucx cannot tell peers to connect to {host}; bind to one address")
    return unmapped(parsed)


class _Server:
    """The native server of an endpoint, and the memory that it may write."""

    def __init__(self, native: _core.UcxServer, spec: _ServerSpec) -> None:
        self._pid = os.getpid()
        self.spec = spec
        self._native = native
        self._kept: list[object] = []

    def serve(self, buffer: Buffer, memory: _core.UcxMemory | None) -> None:
        self._kept += [buffer, memory]
        self._native.add_region(buffer.address, buffer.num_bytes)

    def close(self) -> None:
        if os.getpid() != self._pid:
            # A forked child: it is its parent's, and would end there if it were collected here.
            _ABANDONED.append(self._native)
            return
        if not self._native.close():
            _ABANDONED.append(self._kept)
        self._kept = []


class _UcxExport(Export):
    def __init__(self, registration: Registration, server: _Server) -> None:
        buffer = registration.buffer
        self._server = server
        self.metadata = msgspec.msgpack.encode(
            _RegionSpec(server.spec, buffer.address, buffer.num_bytes, buffer.device >= 0)
        )

    def close(self) -> None:
        # With one region gone nothing may be written any more, and peers hold all or none.
        self._server.close()


class _UcxLink(NetworkLink):
    transport = "ucx"
    direct_bytes = _DIRECT_BYTES

    def __init__(
        self,
        native: _core.UcxLink,
        regions: Sequence[_RegionSpec],
        kept: Sequence[object],
        *,
        device: int,
        stall_s: float,
        section: Section,
        num_threads: int,
        slots: Slots,
    ) -> None:
        super().__init__(device, stall_s, section, num_threads)
        self._pid = os.getpid()
        self.slots = slots
        self._native: _core.UcxLink | None = native
        self._kept = list(kept)  # what a transfer reads and writes here, for as long as UCX may
        self._sequence = native.first_sequence
        self.region_addresses = np.array([region.address for region in regions], np.uint64)
        self.region_bytes = [region.num_bytes for region in regions]
        on_device = device >= 0 or any(region.on_device for region in regions)
        self.path = f"ucx {native.transports}" + (", pinned host slots" if on_device else "")

    def _copy(self, plan: CopyPlan, op: Op, direct_bytes: int, num_sms: int) -> Carried:
        native = self._native
        if native is None:
            raise InvalidUsage("this link is closed; connect again")
        start = native.start_put if op is Op.PUT else native.start_get
        num_sms = num_sms or _core.UcxSettings().num_sms
        start(plan_tables(plan), self._sequence + 1, direct_bytes, num_sms)
        _poll(native)
        return Carried(self.path, num_sms if self.device >= 0 else 0)

    def close(self) -> None:
        """Refuse later transfers, wait for one that runs, and end the connection."""
        if os.getpid() != self._pid:
            _ABANDONED.append(self._native)  # as above
            return
        with self._lock:
            native, self._native = self._native, None
            if native is not None and not native.close():
                _ABANDONED.append(self._kept)
            self._kept = []


def _poll(native: _core.UcxLink) -> None:
    try:
        # In slices, because Python delivers signals (Ctrl-C) only between native calls.
        while not native.poll(_SLICE_S):
            pass
    except KvxferError:
        raise
    except BaseException:
        native.close()  # halfway through a transfer nothing else can follow
        raise


class UcxTransport(Transport):
    """Transfers between hosts by UCX."""

    name = "ucx"
    capabilities = Capabilities(frozenset(MemoryKind), cross_process=True, crosses_hosts=True)

    def __init__(
        self,
        num_threads: int | None = None,
        *,
        options: Mapping[str, str] | None = None,
        stall_s: float = 20.0,
    ) -> None:
        """Set UCX up at the first use.

        Args:
            num_threads: threads that gather and scatter, the caller's included; None = the measured
                best.
            options: settings of UCX without ``UCX_`` in front, before what the environment says:
                ``{"NET_DEVICES": "mlx5_0:1", "TLS": "rc,tcp"}``.
            stall_s: how long a transfer may stand still before it is given up, with its link.
        """
        self._num_threads = num_threads
        self._options = dict(options or {})
        self._stall_s = stall_s
        self._bind_ip = _parse_host("127.0.0.1")
        self._board: Board | None = None
        self._context_made: _core.UcxContext | None = None
        self._server: _Server | None = None

    @classmethod
    def probe(cls) -> Availability:
        """A build with UCX, and a library that fits it."""
        try:
            _load()
        except NotAvailable as error:
            return Availability(False, str(error))
        return Availability(True)

    def serve(self, board: Board, bind_host: str) -> None:
        """Listen on ``bind_host``, a numeric address, from the first export on."""
        self._bind_ip = _parse_host(bind_host)
        self._board = board

    def export(self, registration: Registration) -> Export:
        """Serve a range of memory to peers that know its metadata."""
        buffer = registration.buffer
        memory = self._register(buffer)
        if self._server is None:
            self._server = self._make_server(buffer.device)
        self._server.serve(buffer, memory)
        return _UcxExport(registration, self._server)

    def link(self, cache: KVCache, regions: Sequence[bytes], board: bytes) -> Link:
        """Connect to the peer that serves ``regions``."""
        specs = [decode_spec(region, _RegionSpec) for region in regions]
        process, slot = slot_of(board)
        server = _common_server(specs)
        if server.process != process:
            raise ProtocolMismatch("the regions and the board name different processes")
        self._require_reachable(server.host)
        buffers = [registration.buffer for registration in cache.registrations]
        memories = [self._register(buffer) for buffer in buffers]
        section = _section(cache.device)
        num_threads = choose_num_threads(self._num_threads, section)
        slots = slots_of(cache.device, section)
        native = _core.UcxLink(
            context=self._context,
            host=server.host,
            port=server.port,
            secret=server.secret,
            slot=slot,
            name=f"process {process.pid}",
            num_threads=num_threads,
            settings=self._settings(cache.device, slots),
        )
        _poll(native)
        return _UcxLink(
            native,
            specs,
            [*buffers, *memories],
            device=cache.device,
            stall_s=self._stall_s,
            section=section,
            num_threads=num_threads,
            slots=slots,
        )

    def _settings(self, device: int, slots: Slots) -> _core.UcxSettings:
        return _core.UcxSettings(
            staging=slots.place,
            device=device,
            slot_bytes=slots.slot_bytes,
            num_slots=slots.num_slots,
            stall_s=self._stall_s,
        )

    def _register(self, buffer: Buffer) -> _core.UcxMemory | None:
        """Have UCX know host memory; a GPU's it never touches."""
        if buffer.device >= 0:
            return None
        return self._context.register_memory(buffer.address, buffer.num_bytes)

    @property
    def _context(self) -> _core.UcxContext:
        if self._context_made is None:
            _load()
            defaults = list(_DEFAULTS)
            if self._bind_ip.is_loopback:
                defaults.append(("NET_DEVICES", _LOOPBACK_DEVICE))
            if self._bind_ip.version == 6:
                # UCX 1.22 makes room for an IPv4 address else, and writes one of IPv6 behind it.
                defaults.append(("TCP_AF_PRIO", "inet6"))
            self._context_made = _core.UcxContext(list(self._options.items()), defaults)
        return self._context_made

    def _make_server(self, device: int) -> _Server:
        if self._board is None:
            raise InvalidUsage("ucx exports nothing before it was told its board; call serve")
        secret = secrets.token_bytes(_SECRET_BYTES)
        section = _section(device)
        native = _core.UcxServer(
            context=self._context,
            host=str(self._bind_ip),
            secret=secret,
            board_address=self._board.address,
            num_slots=NUM_SLOTS,
            withdrawn_slot=WITHDRAWN_SLOT,
            num_threads=choose_num_threads(self._num_threads, section),
            settings=self._settings(device, slots_of(device, section)),
        )
        spec = _ServerSpec(ProcessSpec.own(), str(self._bind_ip), native.port, secret)
        return _Server(native, spec)

    def _require_reachable(self, host: str) -> None:
        try:
            far = unmapped(ipaddress.ip_address(host))
        except ValueError as error:
            raise ProtocolMismatch(f"the peer's address {host!r} is not numeric") from error
        near = self._bind_ip
        if far.is_loopback != near.is_loopback:
            raise NotAvailable(
                f"this side is bound to {near} and the peer to {far}; bind both to addresses of "
                "one network (bind_host= of Endpoint, Sender or Receiver)"
            )


def _section(device: int) -> Section:
    """What the profile says of memory of a CUDA device; -1 = of the host."""
    memory = "private" if device < 0 else "device"
    return tuned.section(UcxTransport.name, memory, library=_load)


def slots_of(device: int, section: Section) -> Slots:
    """The slots of one side."""
    place: Place = "host" if device < 0 else "pinned"
    default = _core.UcxSettings()
    return section.slots_in(place) or Slots(
        place=place,
        num_slots=default.num_slots,
        slot_bytes=default.slot_bytes if device < 0 else _DEVICE_SLOT_BYTES,
    )


def _common_server(specs: Sequence[_RegionSpec]) -> _ServerSpec:
    servers = {spec.server for spec in specs}
    if len(servers) != 1:
        raise ProtocolMismatch(
            f"{len(specs)} regions of {len(servers)} servers; a peer sends its own, at least one"
        )
    return servers.pop()
