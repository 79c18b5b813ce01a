"""Two endpoints whose caches cannot be joined: refused by field and both values, nothing sent."""

import re
from typing import Any

import msgspec
import pytest
from cache_content import check_content, shape
from peer_host import PeerHost
from peer_process import RemotePeer
from small_servers import layout, serving
from transport_pairs import Kind

from kvxfer import ToFp8, TPLayout
from kvxfer.control import InitReply, InitRequest, PlaneSpec
from kvxfer.errors import (
    InvalidUsage,
    LayoutMismatch,
    ProtocolMismatch,
)
from kvxfer.session import endpoint as endpoint_module

DIFFERENT: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "num_layers": ({"num_layers": 3}, 3, 2),
    "num_kv_heads": ({"num_kv_heads": 4}, 4, 2),
    "head_dim": ({"head_dim": 16}, 16, 8),
    "dtype": ({"dtype": "float16"}, "float16", "bfloat16"),
    "windows": ({"windows": (0, 64)}, "(0, 64)", "()"),
}


@pytest.mark.parametrize("field", DIFFERENT)
def test_models_that_differ_are_refused_by_field_and_both_values(
    kind: Kind, remote: RemotePeer, field: str
) -> None:
    changes, ours, theirs = DIFFERENT[field]
    far, near = shape(), shape(**changes)
    args = {"memory": kind.memory, "transport": kind.transport}
    addresses = remote.open(far, seed=2, **args)["addresses"]
    local = PeerHost()
    local.open(layout=near.fields, num_blocks=16, num_arrays=1, seed=1, **args)
    try:
        message = f"{field} is {ours} at the source and {theirs} at the destination"
        with pytest.raises(LayoutMismatch, match=re.escape(message)):
            local.endpoint.connect(addresses)
        check_content(far, remote.content(), far.content(2))
    finally:
        local.close()
        remote.call("close")


FP8 = layout(dtype="fp8_e4m3")


def test_latents_are_no_keys_and_values() -> None:
    latents, keys = layout(kv="mla", num_kv_heads=1), layout(num_kv_heads=1)
    message = "kv is mla at the source and split at the destination"
    with (
        serving(latents) as near,
        serving(keys) as far,
        pytest.raises(LayoutMismatch, match=message),
    ):
        near.connect(far.addresses)


def test_dtypes_that_differ_are_refused_unless_a_conversion_is_asked_for() -> None:
    with serving(layout()) as near, serving(FP8) as far:
        with pytest.raises(LayoutMismatch, match=r"dtype is bfloat16 at .* \(ToFp8\)"):
            near.connect(far.addresses)
        with near.connect(far.addresses, convert=ToFp8()) as peer:
            peer.put([0], [1])
            with pytest.raises(LayoutMismatch, match="dtype is fp8_e4m3 at the source and bfl"):
                peer.get([0], [1])
        # From the other end the peer is the source.
        with far.connect(near.addresses, convert=ToFp8()) as peer:
            peer.get([0], [1])
            with pytest.raises(LayoutMismatch, match="dtype is fp8_e4m3 at the source and bfl"):
                peer.put([0], [1])


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3", "float32"])
def test_a_conversion_between_equal_dtypes_is_refused(dtype: str) -> None:
    with (
        serving(layout(dtype=dtype)) as near,
        serving(layout(dtype=dtype)) as far,
        pytest.raises(LayoutMismatch, match=f"dtype is {dtype} .* conversion goes from"),
    ):
        near.connect(far.addresses, convert=ToFp8())


@pytest.mark.usefixtures("heard_leaves")
def test_scales_of_another_model_are_refused_and_leave_no_connection() -> None:
    with serving(layout()) as near, serving(FP8) as far:
        with pytest.raises(InvalidUsage, match=r"k_scale has shape \(3,\); the model has 2 layers"):
            near.connect(far.addresses, convert=ToFp8(k_scale=[1.0, 1.0, 1.0]))
        with near.connect(far.addresses, convert=ToFp8(k_scale=[1.0, 2.0])) as peer:
            assert peer.connection == near.incarnation


def test_a_refused_peer_takes_no_slot() -> None:
    with serving(layout()) as near, serving(layout(head_dim=16)) as far:
        with pytest.raises(LayoutMismatch):
            near.connect(far.addresses)
        assert not far._slots


def test_this_side_refuses_what_the_other_lets_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    # A peer of another mind, or another build.
    monkeypatch.setattr(endpoint_module, "require_joinable", lambda *_: None)
    with (
        serving(layout()) as near,
        serving(layout(head_dim=16)) as far,
        pytest.raises(LayoutMismatch, match="head_dim is 8 at the source and 16"),
    ):
        near.connect(far.addresses)


def test_a_group_of_no_ranks_is_refused() -> None:
    with serving(layout()) as near, pytest.raises(InvalidUsage, match="a group of no ranks"):
        near.connect_all([])


def one_plane_less(reply: InitReply) -> dict[str, Any]:
    return {"planes": reply.planes[:-1]}


def wrong_rank(**fields: Any) -> Any:
    def change(reply: InitReply) -> dict[str, Any]:
        return {"rank": msgspec.structs.replace(reply.rank, **fields)}

    return change


def wrong_layout(**fields: Any) -> Any:
    def change(reply: InitReply) -> dict[str, Any]:
        return {"layout": msgspec.structs.replace(reply.layout, **fields)}

    return change


IMPOSSIBLE = {
    "planes of another number": (one_plane_less, "names 3 planes; its rank has 2 layers of 2"),
    "a rank of none": (wrong_rank(tp_rank=1), "rank cannot be: tp_rank is 1"),
    "layers that are not there": (wrong_rank(layers=(0, 3)), "cannot be: layers end at 3 in a"),
    "an unknown order": (wrong_layout(order="dhn"), "layout or rank cannot be: order is 'dhn'"),
    "windows of other layers": (wrong_layout(windows=[1, 2, 3]), "cannot be: windows has 3 ent"),
    "groups of other layers": (wrong_layout(groups=[0, 1, 0]), "cannot be: groups has 3 entries"),
    "vectors over one another": (
        lambda reply: {"head_stride_bytes": 8},
        "the peer's cache cannot be: head_stride_bytes is 8",
    ),
    "more blocks than memory": (
        lambda reply: {"num_blocks": 9},
        "plane 3 of the peer spans 1152 by",
    ),
    "longer strides than memory": (
        lambda reply: {"block_stride_bytes": 144},
        "3 of the peer spans 1136",
    ),
    "a plane past its region": (
        lambda reply: {"planes": [*reply.planes[:-1], PlaneSpec(0, 3200)]},
        "plane 3 of the peer spans 1024 bytes from offset 3200, but its region has 4096",
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_cache_that_cannot_be_is_refused(case: str) -> None:
    change, message = IMPOSSIBLE[case]
    with serving(layout()) as near, serving(layout()) as far:
        with near.connect(far.addresses) as peer:
            peer.put([0], [1])
        request: Any = InitRequest(
            incarnation="x",
            layout=endpoint_module.layout_spec(near.cache.layout),
            rank=endpoint_module.rank_spec(near.cache.shard.rank),
            transports=["loopback"],
        )
        far.changes = change(far._init(request))
        with pytest.raises(ProtocolMismatch, match=message):
            near.connect(far.addresses)


def test_a_caller_that_cannot_be_is_refused() -> None:
    with serving(layout()) as far:
        request: Any = InitRequest(
            incarnation="x",
            layout=endpoint_module.layout_spec(layout()),
            rank=endpoint_module.rank_spec(TPLayout()),
            transports=["loopback"],
        )
        wrong = msgspec.structs.replace(request.rank, pp_size=3)
        with pytest.raises(ProtocolMismatch, match="pp_size is 3 for 2 layers"):
            far._init(msgspec.structs.replace(request, rank=wrong))
