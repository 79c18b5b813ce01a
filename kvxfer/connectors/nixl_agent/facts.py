"""What an accelerated agent adds to NIXL's metadata, behind its end.

NIXL reads the sections that it knows and stops, so that a stock agent takes such metadata as it
takes any. The addition is sealed by a hash, against damage. It proves nothing: whatever it claims
is checked by :mod:`kvxfer.connectors.nixl_agent.remote_agent` before an address of it is used.

    NIXL's metadata | body (msgpack) | digest, 16 bytes | length of the body, u32 | magic, 8 bytes
"""

import hashlib
import secrets
import struct
from typing import Annotated

import msgspec

from kvxfer.memory.ipc import DeviceRegionSpec
from kvxfer.memory.wire import Address, Descriptor, NumBytes
from kvxfer.transport.process import ProcessSpec
from kvxfer.transport.shm import SegmentSpec

SECRET_BYTES = 16
MAX_REGIONS = 8192
_MAGIC = b"kvxfer1\n"
_DIGEST_BYTES = 16
_TAIL = struct.Struct(f"<{_DIGEST_BYTES}sI{len(_MAGIC)}s")
_MAX_BODY_BYTES = 16 << 20


class RegionFacts(msgspec.Struct, frozen=True):
    """A registered range of memory.

    Attributes:
        address: first byte, as its process and NIXL name it.
        num_bytes: length.
        device: NIXL's device id.
        slot: which word of the ledger says that the registration stands.
        stamp: what that word then is.
        segment: where host memory lies in a shared segment.
        exported: how device memory is opened; None for host memory.
    """

    address: Address
    num_bytes: NumBytes
    device: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    slot: Annotated[int, msgspec.Meta(ge=0, lt=MAX_REGIONS)]
    stamp: Annotated[int, msgspec.Meta(gt=0, le=(1 << 63) - 1)]
    segment: SegmentSpec | None = None
    exported: DeviceRegionSpec | None = None


class AgentFacts(msgspec.Struct, frozen=True):
    """An agent, its process, and its registrations when this was written.

    Attributes:
        process: where it runs.
        ledger_fd: the descriptor of its ledger, a shared segment.
        ledger_bytes: the length of that.
        ledger_address: where it is mapped there.
        secret: what the ledger begins with.
        regions: its registrations.
    """

    process: ProcessSpec
    ledger_fd: Descriptor
    ledger_bytes: Annotated[int, msgspec.Meta(gt=0, le=1 << 20)]
    ledger_address: Address
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    regions: Annotated[list[RegionFacts], msgspec.Meta(max_length=MAX_REGIONS)]


def seal(metadata: bytes, facts: AgentFacts) -> bytes:
    """NIXL's metadata with ``facts`` behind it."""
    body = msgspec.msgpack.encode(facts)
    return metadata + body + _TAIL.pack(_digest(body), len(body), _MAGIC)


def unseal(data: bytes) -> tuple[bytes, AgentFacts | None]:
    """NIXL's part, and the facts; None where there are none, or not this version's, undamaged."""
    if len(data) < _TAIL.size:
        return data, None
    digest, num_bytes, magic = _TAIL.unpack(data[-_TAIL.size :])
    end = len(data) - _TAIL.size
    if magic != _MAGIC or num_bytes > min(end, _MAX_BODY_BYTES):
        return data, None
    metadata, body = data[: end - num_bytes], data[end - num_bytes : end]
    if not secrets.compare_digest(digest, _digest(body)):
        return data, None
    try:
        return metadata, msgspec.msgpack.decode(body, type=AgentFacts)
    except msgspec.MsgspecError:
        return metadata, None


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
