"""Control messages: round trips, bounds, versions, and bytes that nobody should trust."""

import itertools
import pickle
import random
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.control import framing
from kvxfer.control import messages as m
from kvxfer.errors import InvalidUsage, ProtocolMismatch

LAYOUT = m.LayoutSpec(
    num_layers=2,
    num_kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
    block_size=16,
    order="nhd",
    kv="split",
    windows=[0, 4096],
    groups=[0, 1],
)
RANK = m.RankSpec(tp_size=6, tp_rank=5, pp_size=2, pp_rank=0, layers=(0, 1))
REPLY = m.InitReply(
    incarnation="d-1",
    epoch=3,
    transport="shm",
    layout=LAYOUT,
    rank=RANK,
    num_blocks=4096,
    block_stride_bytes=32768,
    token_stride_bytes=2048,
    head_stride_bytes=256,
    planes=[m.PlaneSpec(0, 0), m.PlaneSpec(1, 5 << 32)],
    regions=[b"\x00a", b"b"],
    board=b"flags",
)
GRANT = m.ReserveReply(
    request_id="r",
    state="granted",
    tables=[m.TableSpec([17, 4, 1 << 40]), m.TableSpec([], 32), m.TableSpec([5], 16)],
)
ALL = [
    m.InitRequest(
        incarnation="p-1", layout=LAYOUT, rank=RANK, transports=["nvlink", "shm"], converts=True
    ),
    REPLY,
    m.ReserveRequest(request_id="r" * 256, num_blocks=1 << 20, epoch=0),
    GRANT,
    m.ReserveReply(request_id="r", state="wait", retry_after_s=0.5),
    m.ReserveReply(request_id="r", state="refused", reason="stale epoch"),
    m.CommitRequest("r"),
    m.WatchRequest("p-1"),
    m.WatchReply([("r", "the engine gave it up")]),
    m.AbortRequest("r"),
    m.AbortRequest("r", "p-1#2"),
    m.ReserveRequest(request_id="r", num_blocks=1, epoch=0, incarnation="p-1"),
    m.Done("r"),
    m.ErrorReply("PeerLost", "gone", -5),
]
TYPES = tuple({type(message): None for message in ALL})


def body_of(fields: object) -> list[bytes]:
    return [framing.encode(m.Done("x"))[0], msgspec.msgpack.encode(fields)]


def fields_of(message: msgspec.Struct, /, **changes: object) -> dict[str, object]:
    """The fields as they travel, with changes; without the hash, which would not fit them."""
    fields = msgspec.msgpack.decode(framing.encode(message)[1])
    fields.pop("layout_hash", None)
    return {**fields, **changes}


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_round_trip_among_all_types(message: msgspec.Struct) -> None:
    frames = framing.encode(message)
    assert [type(frame) for frame in frames] == [bytes, bytes]
    assert framing.decode(frames, TYPES) == message
    assert framing.decode(frames, type(message)) == message


def test_messages_are_frozen() -> None:
    with pytest.raises(AttributeError):
        GRANT.state = "wait"  # type: ignore[misc]


def test_head_is_magic_and_version() -> None:
    assert framing.encode(m.Done("x"))[0] == b"KVXF" + struct.pack(">H", framing.PROTOCOL_VERSION)


def test_other_version_is_named_before_the_body_is_read() -> None:
    head = b"KVXF" + struct.pack(">H", 513)
    with pytest.raises(ProtocolMismatch, match=r"version 513, this side 5\b"):
        framing.decode([head, b"\xc1 not msgpack"], TYPES)
    with pytest.raises(ProtocolMismatch, match="version 513"):
        framing.decode([head, b"a", b"frame of the future"], TYPES)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"KVXF"],
        [b"KVXF\x00"],
        [b"KVXF\x00\x04\x00", b"\x80"],
        [b"GET / HTTP/1.1\r\n", b""],
        [pickle.dumps({"type": "done", "request_id": "x"})],
        [b"KVXF\x00\x01", b"\x80"],
        [b"KVXF\x00\x04"],
        [b"KVXF\x00\x04", b"\x80", b"\x80"],
    ],
)
def test_wrong_frames(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolMismatch):
        framing.decode(frames, TYPES)


def test_unknown_fields_are_ignored_and_unknown_types_are_not() -> None:
    assert framing.decode(body_of(fields_of(m.Done("x"), later=[1, {"a": 2}])), TYPES) == m.Done(
        "x"
    )
    with pytest.raises(ProtocolMismatch, match="none of Done"):
        framing.decode(framing.encode(m.CommitRequest("x")), m.Done)
    with pytest.raises(ProtocolMismatch, match="eval"):
        framing.decode(body_of({"type": "eval", "request_id": "x"}), TYPES)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (m.Done("x"), {"request_id": ""}),
        (m.Done("x"), {"request_id": "x" * 257}),
        (m.Done("x"), {"request_id": b"x"}),
        (ALL[0], {"incarnation": "i" * 65}),
        (ALL[0], {"transports": ["shm"] * 33}),
        (ALL[0], {"layout": {**fields_of(LAYOUT), "num_layers": 0}}),
        (ALL[0], {"layout": {**fields_of(LAYOUT), "block_size": 1 << 63}}),
        (ALL[0], {"layout": None}),
        (ALL[0], {"layout": {**fields_of(LAYOUT), "windows": [-1, 0]}}),
        (ALL[0], {"layout": {**fields_of(LAYOUT), "windows": [1 << 63, 0]}}),
        (ALL[0], {"layout": {**fields_of(LAYOUT), "windows": [0] * 65537}}),
        (ALL[0], {"rank": {**fields_of(RANK), "tp_size": 0}}),
        (ALL[0], {"rank": {**fields_of(RANK), "tp_rank": -1}}),
        (ALL[0], {"rank": {**fields_of(RANK), "pp_size": 1 << 63}}),
        (ALL[0], {"rank": {**fields_of(RANK), "layers": [0]}}),
        (ALL[0], {"rank": {**fields_of(RANK), "layers": [0, 1, 2]}}),
        (ALL[0], {"rank": {**fields_of(RANK), "layers": [-1, 1]}}),
        (ALL[0], {"rank": None}),
        (ALL[0], {"converts": 1}),
        (ALL[2], {"num_blocks": -1}),
        (ALL[2], {"tokens": [5, 4]}),
        (ALL[2], {"tokens": [0, 4, 8]}),
        (ALL[2], {"num_blocks": (1 << 20) + 1}),
        (ALL[2], {"num_blocks": True}),
        (ALL[2], {"epoch": -1}),
        (ALL[0], {"layout": {**fields_of(LAYOUT), "groups": [256]}}),
        (ALL[0], {"layout": {**fields_of(LAYOUT), "groups": [-1]}}),
        (ALL[0], {"layout": {**fields_of(LAYOUT), "groups": [0] * 65537}}),
        (ALL[0], {"layout": {**fields_of(LAYOUT), "groups": None}}),
        (GRANT, {"tables": [[[-1], 0]]}),
        (GRANT, {"tables": [[[1 << 63], 0]]}),
        (GRANT, {"tables": [[[1.0], 0]]}),
        (GRANT, {"tables": [[[3, 4, 3], 0]]}),
        (GRANT, {"tables": [[[3, 4], 0], [[], 0], [[5, 3], 0]]}),
        (GRANT, {"tables": [[[3], -1]]}),
        (GRANT, {"tables": [[[3], 1 << 63]]}),
        (GRANT, {"tables": [[3, 4]]}),
        (GRANT, {"tables": [[]]}),
        (GRANT, {"tables": []}),
        (GRANT, {"tables": [[[], 0]] * 257}),
        (GRANT, {"tables": [[list(range((1 << 20) + 1)), 0]]}),
        (GRANT, {"tables": [[list(range(1 << 20)), 0], [[1 << 20], 0]]}),
        (GRANT, {"state": "wait"}),
        (GRANT, {"state": "maybe"}),
        (GRANT, {"retry_after_s": float("nan")}),
        (GRANT, {"retry_after_s": float("inf")}),
        (GRANT, {"retry_after_s": -0.1}),
        (REPLY, {"num_blocks": 0}),
        (REPLY, {"num_blocks": 1 << 62}),
        (REPLY, {"block_stride_bytes": 1 << 63}),
        (REPLY, {"block_stride_bytes": 0}),
        (REPLY, {"token_stride_bytes": 0}),
        (REPLY, {"token_stride_bytes": 1 << 59}),
        (REPLY, {"head_stride_bytes": 0}),
        (REPLY, {"head_stride_bytes": 1 << 60}),
        (REPLY, {"rank": {**fields_of(RANK), "tp_size": 0}}),
        (REPLY, {"planes": [[2, 0]]}),
        (REPLY, {"planes": [[-1, 0]]}),
        (REPLY, {"planes": [[0, (1 << 63) - 1]]}),
        (REPLY, {"planes": []}),
        (REPLY, {"planes": [[0, 0]] * 65537}),
        (REPLY, {"regions": [b""] * 4097}),
        (REPLY, {"regions": [b"", bytes((64 << 10) + 1)]}),
        (REPLY, {"board": bytes((64 << 10) + 1)}),
        (m.ErrorReply("k", "m"), {"message": "m" * 4097}),
        (m.ErrorReply("k", "m"), {"code": 1 << 31}),
    ],
)
def test_values_outside_the_bounds_do_not_decode(
    message: msgspec.Struct, change: dict[str, object]
) -> None:
    assert framing.decode(body_of(fields_of(message)), TYPES) == message
    with pytest.raises(ProtocolMismatch, match=type(message).__name__):
        framing.decode(body_of(fields_of(message, **change)), TYPES)


def test_a_cache_may_end_at_the_limit_and_not_behind_it() -> None:
    span_bytes = 4096 * 32768 + 16 * 2048 + 8 * 256
    last = m.PlaneSpec(0, m.MAX_INT - span_bytes)
    msgspec.structs.replace(REPLY, planes=[last])
    with pytest.raises(InvalidUsage, match="ends past"):
        msgspec.structs.replace(REPLY, planes=[m.PlaneSpec(0, last.offset_bytes + 1)])


def test_limits_themselves_decode() -> None:
    for ends in ([0, 1 << 20], [0, *range(1, 256), 1 << 20]):
        tables = [m.TableSpec(list(range(*pair))) for pair in itertools.pairwise(ends)]
        largest = m.ReserveReply(request_id="r", state="granted", tables=tables)
        assert framing.decode(framing.encode(largest), m.ReserveReply) == largest
    wide = msgspec.structs.replace(REPLY, planes=[m.PlaneSpec(1, 1 << 40)] * 65536)
    assert framing.decode(framing.encode(wide), m.InitReply) == wide


def test_two_field_checks_hold_where_a_message_is_built() -> None:
    with pytest.raises(InvalidUsage, match=r"planes\[0\].region is 9, but there are 2"):
        msgspec.structs.replace(REPLY, planes=[m.PlaneSpec(9, 0)])
    with pytest.raises(InvalidUsage, match=r"planes\[0\] .* heads 1152921504606846976, ends past"):
        msgspec.structs.replace(REPLY, head_stride_bytes=1 << 60)
    with pytest.raises(InvalidUsage, match="3 block ids hold 2 distinct"):
        m.ReserveReply(
            request_id="r", state="granted", tables=[m.TableSpec([1, 2]), m.TableSpec([1])]
        )
    halves = [m.TableSpec(list(range(*ends))) for ends in ((0, 1 << 19), (1 << 19, 1 + (1 << 20)))]
    with pytest.raises(InvalidUsage, match="1048577 block ids in all tables; use at most 1048576"):
        m.ReserveReply(request_id="r", state="granted", tables=halves)
    with pytest.raises(InvalidUsage, match="'refused' with 1 block tables"):
        m.ReserveReply(request_id="r", state="refused", tables=[m.TableSpec([])])


def test_deep_nesting_is_refused_or_skipped_and_never_crashes() -> None:
    head, body = framing.encode(m.Done("x"))
    for depth in (200, 100_000):
        with pytest.raises(ProtocolMismatch):
            framing.decode([head, b"\x91" * depth + b"\x01"], TYPES)
    with_field = b"\x83" + body[1:] + b"\xa1z"  # a third key, "z", which no version knows
    assert framing.decode([head, with_field + b"\x91" * 200 + b"\x01"], TYPES) == m.Done("x")
    with pytest.raises(ProtocolMismatch, match="recursion"):
        framing.decode([head, with_field + b"\x91" * 100_000 + b"\x01"], TYPES)


def test_counts_larger_than_the_payload_do_not_allocate() -> None:
    head = framing.encode(m.Done("x"))[0]
    for count in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        tables = b"\x82\xa4type\xadreserve_reply\xa6tables"
        for body in (count, tables + count, tables + b"\x91\x92" + count):
            with pytest.raises(ProtocolMismatch):
                framing.decode([head, body], TYPES)


def test_oversize_bodies_are_refused_on_both_sides() -> None:
    big = m.InitReply(**{**msgspec.structs.asdict(REPLY), "regions": [bytes(64 << 10)] * 4096})
    with pytest.raises(InvalidUsage, match=f"the limit is {framing.MAX_MESSAGE_BYTES}"):
        framing.encode(big)
    with pytest.raises(ProtocolMismatch, match="the limit is"):
        framing.decode(
            [framing.encode(m.Done("x"))[0], bytes(framing.MAX_MESSAGE_BYTES + 1)], TYPES
        )


def test_what_msgpack_cannot_hold_is_invalid_usage() -> None:
    for value in (object(), 1 << 65, "\ud800"):
        with pytest.raises(InvalidUsage, match="Done cannot be encoded"):
            framing.encode(m.Done(value))  # type: ignore[arg-type]


class Untagged(msgspec.Struct):
    x: int


class Clash(msgspec.Struct, tag="done"):
    x: int


@pytest.mark.parametrize("types", [(), (Untagged,), (m.Done, Clash), (dict,), ("Done",)])
def test_types_that_cannot_be_told_apart(types: tuple[type, ...]) -> None:
    with pytest.raises(InvalidUsage):
        framing.decode(framing.encode(m.Done("x")), types)


def test_ten_thousand_mutations_decode_or_raise_protocol_mismatch() -> None:
    rng = random.Random(20240607)
    bodies = [framing.encode(message)[1] for message in ALL]
    head = framing.encode(ALL[0])[0]
    num_refused = 0
    for _ in range(10_000):
        body = bytearray(rng.choice(bodies))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(body))
            match rng.randrange(3):
                case 0:
                    body[at] = rng.randrange(256)
                case 1:
                    del body[at : at + rng.randint(1, 8)]
                case 2:
                    body[at:at] = rng.randbytes(rng.randint(1, 8))
            body = body or bytearray(b"\xc0")
        try:
            assert type(framing.decode([head, bytes(body)], TYPES)) in TYPES
        except ProtocolMismatch:
            num_refused += 1
    assert 1000 < num_refused < 10_000


@given(st.lists(st.binary(max_size=64), max_size=4))
def test_arbitrary_frames(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolMismatch):
        framing.decode(frames, TYPES)


@given(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=256),
    st.lists(st.integers(0, (1 << 63) - 1), min_size=1, unique=True),
    st.integers(1, 5),
)
def test_round_trip_of_any_grant(request_id: str, block_ids: list[int], num_tables: int) -> None:
    tables = [m.TableSpec(block_ids[turn::num_tables], turn) for turn in range(num_tables)]
    message = m.ReserveReply(request_id=request_id, state="granted", tables=tables)
    assert sorted(message.block_ids) == sorted(block_ids)
    assert framing.decode(framing.encode(message), TYPES) == message
