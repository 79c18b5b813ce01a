"""Requests with their limits, and the hash that a layout travels with."""

import struct

import msgspec
import pytest

from kvxfer.control import Done, InitReply, InitRequest, LayoutSpec, PlaneSpec, RankSpec, framing
from kvxfer.errors import InvalidUsage, ProtocolMismatch

HEAD, BODY = framing.encode(Done("x"))
LAYOUT = LayoutSpec(
    num_layers=2,
    num_kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
    block_size=16,
    order="nhd",
    kv="split",
    windows=[],
    groups=[],
)
RANK = RankSpec(tp_size=1, tp_rank=0, pp_size=1, pp_rank=0, layers=None)
OTHERS = {
    "num_layers": 3,
    "num_kv_heads": 4,
    "head_dim": 64,
    "dtype": "float16",
    "block_size": 32,
    "order": "hnd",
    "kv": "latent",
    "windows": [0, 4096],
    "groups": [0, 1],
}


def limit(milliseconds: int) -> bytes:
    return struct.pack(">I", milliseconds)


@pytest.mark.parametrize("limit_ms", [1, 5000, 3_600_000])
def test_a_request_says_how_long_its_caller_waits(limit_ms: int) -> None:
    found = framing.decode_request([HEAD, BODY, limit(limit_ms)], (Done,))
    assert found == (Done("x"), limit_ms / 1000)
    assert framing.encode_limit(limit_ms / 1000) == limit(limit_ms)


@pytest.mark.parametrize(
    ("left_s", "limit_ms"), [(-1.0, 1), (0.0, 1), (0.0123, 12), (1e6, 3_600_000)]
)
def test_a_limit_is_always_one_that_is_accepted(left_s: float, limit_ms: int) -> None:
    assert framing.encode_limit(left_s) == limit(limit_ms)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([HEAD, BODY], "frames of 6, .* bytes; version 5 has a head, a body and 4 bytes"),
        ([HEAD], "frames of 6 bytes"),
        ([HEAD, BODY, b""], "limit_ms"),
        ([HEAD, BODY, limit(1) + b"x"], "limit_ms"),
        ([HEAD, BODY, limit(1), b""], "limit_ms"),
        ([HEAD, BODY, limit(0)], "limit_ms of the request is 0; use 1 to 3600000"),
        ([HEAD, BODY, limit(3_600_001)], "is 3600001"),
        ([HEAD, b"\xc1", limit(1)], "none of Done"),
        ([], "not that of a kvxfer message"),
    ],
)
def test_requests_that_are_refused(frames: list[bytes], text: str) -> None:
    with pytest.raises(ProtocolMismatch, match=text):
        framing.decode_request(frames, (Done,))


def test_the_version_is_judged_before_all_else() -> None:
    for rest in ([], [b"\xc1"], [b"a", b"b", b"c", b"d"]):
        with pytest.raises(ProtocolMismatch, match="version 9, this side 5"):
            framing.decode_request([b"KVXF\x00\x09", *rest], (Done,))


def init(layout: LayoutSpec, **fields: str) -> InitRequest:
    return InitRequest(incarnation="p", layout=layout, rank=RANK, transports=["shm"], **fields)


def reply(layout: LayoutSpec, **fields: str) -> InitReply:
    return InitReply(
        incarnation="d",
        epoch=0,
        transport="shm",
        layout=layout,
        rank=RANK,
        num_blocks=1,
        block_stride_bytes=1,
        token_stride_bytes=1,
        head_stride_bytes=1,
        planes=[PlaneSpec(0, 0)],
        regions=[b""],
        **fields,
    )


@pytest.mark.parametrize("make", [init, reply])
def test_the_hash_is_filled_in_and_travels(make: type[InitRequest]) -> None:
    message = make(LAYOUT)
    assert message.layout_hash == LAYOUT.hash
    assert len(LAYOUT.hash) == 16
    frames = framing.encode(message)
    assert LAYOUT.hash.encode() in frames[1]
    assert framing.decode(frames, type(message)) == message
    assert make(LAYOUT, layout_hash=LAYOUT.hash) == message  # type: ignore[call-arg]


def test_the_hash_is_what_it_was() -> None:
    """It is part of the protocol: another value is another `PROTOCOL_VERSION`."""
    assert LAYOUT.hash == "903401a5dcc32a52"


def test_every_field_of_the_layout_counts() -> None:
    assert set(OTHERS) == set(LayoutSpec.__struct_fields__)
    hashes = {
        msgspec.structs.replace(LAYOUT, **{name: value}).hash for name, value in OTHERS.items()
    }
    assert len(hashes | {LAYOUT.hash}) == len(OTHERS) + 1


@pytest.mark.parametrize("make", [init, reply])
def test_the_hash_of_another_layout_is_refused_with_both_values(make: type[InitRequest]) -> None:
    other = msgspec.structs.replace(LAYOUT, num_layers=3)
    text = f"layout_hash is '{other.hash}', but .* has '{LAYOUT.hash}'"
    with pytest.raises(InvalidUsage, match=text):
        make(LAYOUT, layout_hash=other.hash)  # type: ignore[call-arg]
    head, body = framing.encode(make(LAYOUT))
    wrong = body.replace(LAYOUT.hash.encode(), other.hash.encode())
    with pytest.raises(ProtocolMismatch, match=text):
        framing.decode([head, wrong], (InitRequest, InitReply))


def test_a_layout_with_a_field_of_the_future_is_refused() -> None:
    fields = msgspec.msgpack.decode(framing.encode(init(LAYOUT))[1])
    fields["layout"]["later"] = 1
    fields["layout_hash"] = "0123456789abcdef"
    with pytest.raises(ProtocolMismatch, match="a field that one side does not know"):
        framing.decode([HEAD, msgspec.msgpack.encode(fields)], InitRequest)
