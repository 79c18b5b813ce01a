"""Routes are kept, so that only the first transfer of its kind works one out."""

import pytest

from kvxfer.errors import LayoutMismatch
from kvxfer.layout import KVLayout, KVShard, KVView, ToFp8, TPLayout
from kvxfer.session import routes as routes_module
from kvxfer.session.routes import Routes
from kvxfer.transport import Op


def view(tp_size: int, *, dtype: str = "bfloat16") -> KVView:
    model = KVLayout(4, 2, head_dim=8, dtype=dtype)
    return KVView.dense(KVShard(model, TPLayout(tp_size)), 8, 4096)


def test_a_route_is_kept_by_direction_and_layers() -> None:
    near, far = view(1), view(2)
    routes = Routes(near, far, None)
    put = routes.of(Op.PUT)
    assert (put.src, put.dst) == (near, far)
    assert (routes.of(Op.GET).src, routes.of(Op.GET).dst) == (far, near)
    assert routes.of(Op.PUT) is put
    some = routes.of(Op.PUT, [2, 1])
    assert some is not put
    assert routes.of(Op.PUT, (1, 2, 2)) is some
    assert routes.of(Op.PUT, []) is not put


def test_the_oldest_route_goes_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes_module, "_MAX_KEPT", 2)
    routes = Routes(view(1), view(1), None)
    first, second, _ = (routes.of(Op.PUT, [layer]) for layer in range(3))
    assert routes.of(Op.PUT, [1]) is second
    assert routes.of(Op.PUT, [0]) is not first


def test_a_direction_that_is_refused_is_not_kept() -> None:
    routes = Routes(view(1), view(1, dtype="fp8_e4m3"), ToFp8())
    routes.of(Op.PUT)
    for _ in range(2):
        with pytest.raises(LayoutMismatch, match="dtype is fp8_e4m3 at the source"):
            routes.of(Op.GET)
