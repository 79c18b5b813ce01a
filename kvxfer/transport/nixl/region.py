"""What a side says of a region that it exports, sealed against damage."""

import hashlib
import secrets
from collections.abc import Sequence
from typing import Annotated

import msgspec

from kvxfer.errors import ProtocolMismatch
from kvxfer.memory.wire import Address, Device, NumBytes
from kvxfer.transport.board import decode_spec
from kvxfer.transport.nixl import wire
from kvxfer.transport.nixl.memory import Range
from kvxfer.transport.nixl.reach import Side
from kvxfer.transport.process import ProcessSpec

_SEAL_BYTES = 16

_Text = Annotated[str, msgspec.Meta(max_length=64)]


class RegionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A region and who serves it.

    Attributes:
        process: that has it.
        host: which start of which host that is.
        agent: its agent's name.
        backend: NIXL's plug-in.
        is_loopback: whether it is bound to a loopback address.
        secret: shows the server that a peer was given this.
        device: the CUDA device of that process which has the region; -1 for host memory.
        device_uuid: of that GPU; else empty.
        rdma: whether network cards reach that memory.
        in_place: whether NIXL knows the region itself, not the slots alone.
        address: of the region in that process.
        num_bytes: of the region.
        metadata: NIXL's.
    """

    process: ProcessSpec
    host: _Text
    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    backend: _Text
    is_loopback: bool
    secret: Annotated[
        bytes, msgspec.Meta(min_length=wire.SECRET_BYTES, max_length=wire.SECRET_BYTES)
    ]
    device: Device
    device_uuid: _Text
    rdma: bool
    in_place: bool
    address: Address
    num_bytes: NumBytes
    metadata: Annotated[bytes, msgspec.Meta(min_length=1, max_length=wire.MAX_METADATA_BYTES)]

    @property
    def peer(self) -> tuple[object, ...]:
        """What all regions of a peer have in common."""
        who = (self.process, self.host, self.agent, self.backend, self.is_loopback, self.secret)
        return (*who, self.device, self.device_uuid, self.rdma)

    @property
    def memory(self) -> Range:
        """Where it lies."""
        return Range(self.address, self.num_bytes, self.device)

    @property
    def side(self) -> Side:
        """What a path to it depends on."""
        return Side(self.device_uuid, self.rdma, self.process.pid_namespace)


class _Sealed(msgspec.Struct, frozen=True):
    seal: Annotated[bytes, msgspec.Meta(min_length=_SEAL_BYTES, max_length=_SEAL_BYTES)]
    region: bytes


def _seal(region: bytes) -> bytes:
    return hashlib.blake2b(region, digest_size=_SEAL_BYTES).digest()


def seal(spec: RegionSpec) -> bytes:
    """A region's metadata, for peers."""
    region = msgspec.msgpack.encode(spec)
    return msgspec.msgpack.encode(_Sealed(_seal(region), region))


def open_sealed(data: bytes) -> RegionSpec:
    """A region's metadata: NIXL would take damaged bytes for addresses.

    Raises:
        ProtocolMismatch: they are damaged, or another version's.
    """
    sealed = decode_spec(data, _Sealed)
    if not secrets.compare_digest(_seal(sealed.region), sealed.seal):
        raise ProtocolMismatch(f"{len(data)} bytes of metadata do not fit their seal")
    return decode_spec(sealed.region, RegionSpec)


def common_peer(specs: Sequence[RegionSpec]) -> RegionSpec:
    """One of the regions, for what all have in common.

    Raises:
        ProtocolMismatch: there is none, or they are of several servers.
    """
    if len({spec.peer for spec in specs}) != 1:
        raise ProtocolMismatch(
            f"{len(specs)} regions of {len({spec.peer for spec in specs})} servers; a peer sends "
            "its own, at least one"
        )
    return specs[0]
