"""ToFp8: scales, what is refused, and the error that its docstring promises."""

import numpy as np
import pytest
from fp8_oracle import FINITE, convert, to_e4m3, to_float32
from numpy.typing import NDArray

from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVLayout, Share, ToFp8

MODEL = KVLayout(4, 2, head_dim=8)
MLA = KVLayout(4, 1, head_dim=8, kv="mla")
ALL = Share(range(4), range(2))
PER_LAYER = np.array([1, 2, 4, 8], np.float32)
PER_HEAD = 2 ** np.arange(8, dtype=np.float32).reshape(4, 2)
# Of 2**-126 .. 2**126, and what lies between powers of two.
SCALES = [2.0**-126, 1e-20, 0.013, 1 / 3, 1.0, 1.7, 448.0, 3e20, 2.0**126]


def test_one_scale_serves_all() -> None:
    found = ToFp8(2.0, 4.0).inverse_scales(MODEL, ALL)
    assert found.dtype == np.float32
    assert found.tolist() == [[[0.5]] * 4, [[0.25]] * 4]
    assert ToFp8().inverse_scales(MODEL, ALL).tolist() == [[[1.0]] * 4] * 2


def test_a_scale_a_layer() -> None:
    share = Share(range(1, 3), range(2))
    assert ToFp8(PER_LAYER, 2.0).inverse_scales(MODEL, share).tolist() == [
        [[0.5], [0.25]],
        [[0.5], [0.5]],
    ]


def test_a_scale_a_head_of_k_gives_v_one_a_head_too() -> None:
    share = Share(range(2, 4), range(1, 2))
    conversion = ToFp8(PER_HEAD, PER_LAYER)
    assert conversion.per_head
    assert conversion.inverse_scales(MODEL, share).tolist() == [
        [[1 / 32], [1 / 128]],
        [[1 / 4], [1 / 8]],
    ]
    whole = conversion.inverse_scales(MODEL, ALL)
    assert whole.shape == (2, 4, 2)
    assert np.array_equal(whole[0], 1 / PER_HEAD)
    assert np.array_equal(whole[1], np.broadcast_to(1 / PER_LAYER[:, None], (4, 2)))


def test_mla_has_the_scale_of_k_alone() -> None:
    conversion = ToFp8(PER_LAYER, PER_HEAD[:1])
    found = conversion.inverse_scales(MLA, Share(range(4), range(1)))
    assert found.tolist() == [[[1.0], [0.5], [0.25], [0.125]]]


def test_layers_alone_have_no_scales_of_heads() -> None:
    assert not ToFp8(PER_LAYER, 1.0).per_head
    assert ToFp8(1.0, PER_HEAD).per_head


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (0, r"holds 0\.0; use scales of 2\*\*-126"),
        (-1.0, r"holds -1\.0"),
        ([1.0, float("nan")], "holds nan"),
        (float("inf"), "holds inf"),
        (1e-39, r"holds 1\.0\d+e-39"),
        (2.0**127, r"holds 1\.7014"),
        (1e39, "holds inf"),
        (np.ones((1, 2, 3)), "has 3 axes; use a number, .layers. or .layers, heads."),
        ("one", "is 'one'; use a number or an array of numbers"),
        (None, "holds nan|is None"),
        ([[1.0], [1.0, 2.0]], "is .*; use a number or an array of numbers"),
    ],
)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_wrong_scales_are_refused(name: str, scale: object, message: str) -> None:
    with pytest.raises(InvalidUsage, match=f"{name} ({message})"):
        ToFp8(**{name: scale})  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(3,), (1,), (4, 1), (2, 4), (1, 2), (0,)])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_of_another_model_are_refused(name: str, shape: tuple[int, ...]) -> None:
    conversion = ToFp8(**{name: np.ones(shape, np.float32)})
    message = (
        rf"{name} has shape \({shape[0]},.*4 layers of 2 KV heads, so use \(\), \(4,\) or \(4, 2\)"
    )
    with pytest.raises(InvalidUsage, match=message):
        conversion.inverse_scales(MODEL, ALL)


def test_what_was_checked_cannot_be_changed_afterwards() -> None:
    scales = PER_LAYER.copy()
    conversion = ToFp8(scales)
    scales[:] = 0
    assert np.isfinite(conversion.inverse_scales(MODEL, ALL)).all()
    with pytest.raises(ValueError, match="read-only"):
        conversion.k_scale[0] = 0  # type: ignore[index]


# The promised error, over every finite bfloat16 and float16.


def read_back(codes: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The values that codes stand for; not for NaN."""
    return np.where(codes & 0x80, -1, 1) * FINITE[np.minimum(codes & 0x7F, len(FINITE) - 1)]


def errors_past_the_promise(dtype: str, scale: np.float32, slack: float = 2.0**-23) -> int:
    """How many finite elements are further off than the docstring of ToFp8 says."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[np.isfinite(to_float32(bits, dtype))]
    value = to_float32(bits, dtype).astype(np.float64)
    inverse = ToFp8(scale).inverse_scales(MODEL, Share(range(1), range(1)))[0, 0, 0]
    stored = read_back(convert(bits, dtype, inverse)) * np.float64(scale)
    size, most = np.abs(value), 448 * np.float64(scale)
    allowed = np.where(size >= scale / 64, size / 16, scale / 1024) + size * slack
    kept = size <= most
    wrong = np.abs(stored - value) > allowed
    saturated = np.where(value < 0, -most, most)
    return int(np.count_nonzero(np.where(kept, wrong, stored != saturated)))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_elements_are_as_near_as_promised(dtype: str, scale: float) -> None:
    assert errors_past_the_promise(dtype, np.float32(scale)) == 0


def test_a_smaller_promise_would_be_broken() -> None:
    assert errors_past_the_promise("float16", np.float32(1), slack=-0.005) > 0


# The table that stands behind these.


def test_the_table_of_e4m3_by_known_values() -> None:
    known = {0x00: 0, 0x01: 2**-9, 0x07: 7 * 2**-9, 0x08: 2**-6, 0x38: 1, 0x3F: 1.875, 0x7E: 448}
    assert {code: FINITE[code] for code in known} == known
    assert len(FINITE) == 0x7F
    assert (np.diff(FINITE) > 0).all()


def test_rounding_by_known_values() -> None:
    known = {
        0.0: 0x00,
        1.0: 0x38,
        1.0625: 0x38,  # halfway to 1.125: the even one
        1.1875: 0x3A,  # halfway from 1.125 to 1.25: the even one
        1.07: 0x39,
        2.0**-10: 0x00,
        1.5 * 2.0**-9: 0x02,
        449.0: 0x7E,
        1e30: 0x7E,
        float("inf"): 0x7E,
    }
    values = np.array([*known], np.float32)
    codes = np.array([*known.values()], np.uint8)
    assert np.array_equal(to_e4m3(values), codes)
    assert np.array_equal(to_e4m3(-values), codes | 0x80)
    assert to_e4m3(np.array([np.nan], np.float32)).tolist() == [0x7F]
    every = np.arange(0x7F, dtype=np.uint8)
    assert np.array_equal(to_e4m3(FINITE.astype(np.float32)), every)
