"""Arrays that say their shape are held to it; flat ones are bytes."""

import numpy as np
import pytest

from kvxfer import KVCache, KVLayout, TPLayout
from kvxfer.errors import InvalidUsage
from kvxfer.memory.array_shape import require_fitting

MODEL = KVLayout(4, 8, head_dim=16, block_size=4, dtype="float16")
HALF = TPLayout(2, 0)
BLOCKS = 6


def check(shape: tuple[int, ...], dtype: str = "float16", **fields: str) -> None:
    layout = HALF.rank_layout(KVLayout(4, 8, head_dim=16, block_size=4, dtype="float16", **fields))
    num_arrays = 1 if shape[0] == 4 or fields.get("kv") == "chunked" else 4
    array = np.zeros(shape, dtype)
    require_fitting(layout, array, array.nbytes, num_arrays=num_arrays, num_blocks=BLOCKS)


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        ((4, 2, 6, 4, 4, 16), {}),
        ((2, 6, 4, 4, 16), {}),
        ((2, 6, 4, 64), {}),
        ((1, 2, 6, 4, 4, 16), {}),
        ((6, 2, 4, 4, 16), {"kv": "packed", "order": "hnd"}),
        ((6, 4, 4, 32), {"kv": "head_packed", "order": "hnd"}),
        ((6, 2, 4, 4, 64), {"kv": "chunked"}),
    ],
)
def test_the_shapes_that_engines_have(shape: tuple[int, ...], fields: dict[str, str]) -> None:
    check(shape, **fields)


def test_bytes_may_have_axes_too() -> None:
    check((2, 6, 4 * 4 * 32), dtype="uint8")


@pytest.mark.parametrize(
    "shape",
    [
        (4, 2, 6, 4, 8, 16),  # all heads, though this rank has half of them
        (6, 2, 4, 4, 16),  # packed
        (2, 6, 4, 4, 8),
        (2, 6, 4, 4, 2, 16),
    ],
)
def test_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidUsage, match=r"is no cache of .*token 4, head 4, element 16\)"):
        check(shape)


def test_elements_of_another_size_are_refused() -> None:
    with pytest.raises(InvalidUsage, match="elements of 4 bytes for a cache of float16, of 2"):
        check((2, 6, 4, 4, 16), "float32")


def test_a_cache_holds_its_arrays_to_it() -> None:
    whole = np.zeros((4, 2, BLOCKS, 4, 8, 16), np.float16)
    KVCache(MODEL, whole).close()
    with pytest.raises(InvalidUsage, match="check order, kv, rank and block_size"):
        KVCache(MODEL, whole, rank=HALF)
    KVCache(MODEL, whole.reshape(-1), rank=HALF).close()
