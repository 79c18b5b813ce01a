"""The test pattern of caches that differ in layout, heads and dtype, and what its tables refuse."""

from typing import Any

import fp8_oracle
import numpy as np
import pytest
from copy_boxes import CopyBox, core_tables
from numpy.typing import NDArray
from pattern_oracle import vector

from kvxfer import _core
from kvxfer.errors import InvalidUsage

SEED = 7
NO_PAGE = (1 << 64) - 1
PLANES, BLOCKS, TOKENS, HEADS = 2, 5, 4, 3
PLANE_KEYS = np.arange(PLANES, dtype=np.uint64) << np.uint64(48)
FIRST_HEAD = 9
POOL = _core.WorkerPool(2)

Bytes = NDArray[np.uint8]


def tables(
    cache: Bytes,
    axes: str,
    *,
    tokens: int = TOKENS,
    heads: slice = slice(0, HEADS),
    vector_bytes: int | None = None,
    conversion: str = "none",
    inverse_scales: Any = None,
) -> _core.PatternTables:
    """Of an array with axes p(lane), b(lock), t(oken), h(ead) in the order of ``axes``, and bytes.

    The first ``tokens`` of each block; block b holds tokens from TOKENS * b on.
    """
    stride = dict(zip(axes, cache.strides, strict=False))
    planes = np.arange(PLANES, dtype=np.uint64) * np.uint64(stride["p"])
    blocks = np.arange(BLOCKS, dtype=np.uint64)
    first = cache.ctypes.data + heads.start * stride["h"]
    return _core.PatternTables(
        planes + np.uint64(first),
        PLANE_KEYS,
        blocks * np.uint64(stride["b"]),
        blocks * np.uint64(TOKENS),
        np.full(BLOCKS, tokens, np.uint32),
        token_stride=stride["t"],
        head_stride=stride["h"],
        num_heads=heads.stop - heads.start,
        first_head=FIRST_HEAD + heads.start,
        vector_bytes=vector_bytes or cache.shape[-1],
        conversion=conversion,
        inverse_scales=inverse_scales,
    )


def empty(axes: str, num_bytes: int) -> Bytes:
    sizes = {"p": PLANES, "b": BLOCKS, "t": TOKENS, "h": HEADS}
    return np.zeros((*[sizes[axis] for axis in axes], num_bytes), np.uint8)


def find(made: _core.PatternTables, seed: int = SEED) -> tuple[int, int]:
    found = _core.pattern_check_host(POOL, made, seed)
    return found.num_wrong_words, found.first_page


@pytest.mark.parametrize("axes", ["pbth", "pbht", "bpth", "bhpt"])
@pytest.mark.parametrize("num_bytes", [16, 22])
def test_the_content_does_not_depend_on_the_layout(axes: str, num_bytes: int) -> None:
    cache = empty(axes, num_bytes)
    _core.pattern_fill_host(POOL, tables(cache, axes), SEED)
    for plane, block, token, head in np.ndindex(PLANES, BLOCKS, TOKENS, HEADS):
        index = {"p": plane, "b": block, "t": token, "h": head}
        place = TOKENS * block + token
        wanted = vector(SEED, int(PLANE_KEYS[plane]), place, FIRST_HEAD + head, num_bytes)
        assert np.array_equal(cache[tuple(index[axis] for axis in axes)], wanted)
    assert find(tables(cache, axes)) == (0, NO_PAGE)


def test_a_transposed_cache_passes_and_a_relabelled_one_does_not() -> None:
    cache = empty("pbth", 16)
    _core.pattern_fill_host(POOL, tables(cache, "pbth"), SEED)
    transposed = np.ascontiguousarray(cache.swapaxes(2, 3))
    assert find(tables(transposed, "pbht")) == (0, NO_PAGE)
    rolled = np.roll(cache, 1, axis=3)  # heads
    assert find(tables(rolled, "pbth")) == (cache.size // 8, 0)
    rolled = np.roll(cache, 1, axis=2)  # tokens
    assert find(tables(rolled, "pbth")) == (cache.size // 8, 0)


def test_parts_of_tokens_and_heads() -> None:
    """Ranks that fill some heads each make one whole; fewer tokens leave the others alone."""
    cache = empty("pbth", 16)
    for heads in (slice(0, 1), slice(1, HEADS)):
        _core.pattern_fill_host(POOL, tables(cache, "pbth", heads=heads), SEED)
    assert find(tables(cache, "pbth")) == (0, NO_PAGE)
    cache[:] = 0
    _core.pattern_fill_host(POOL, tables(cache, "pbth", tokens=TOKENS - 1), SEED)
    assert find(tables(cache, "pbth", tokens=TOKENS - 1)) == (0, NO_PAGE)
    assert not cache[:, :, TOKENS - 1].any()
    assert find(tables(cache, "pbth")) == (PLANES * BLOCKS * HEADS * 2, 0)
    assert find(tables(cache, "pbth", tokens=0)) == (0, NO_PAGE)


@pytest.mark.parametrize("byte", [0, 7, 8, 21])
def test_each_byte_of_a_partial_word_counts(byte: int) -> None:
    cache = empty("pbth", 22)
    _core.pattern_fill_host(POOL, tables(cache, "pbth"), SEED)
    cache[1, 2, 3, 1, byte] ^= 1
    assert find(tables(cache, "pbth")) == (1, BLOCKS + 2)


def scales() -> NDArray[np.float32]:
    exponents = np.random.default_rng(1).uniform(-8, 8, PLANES * HEADS)
    return (2.0**exponents).astype(np.float32)


def converted_cache(dtype: str, num_bytes: int) -> Bytes:
    """A source filled here and converted by numpy."""
    source = empty("pbth", num_bytes)
    _core.pattern_fill_host(POOL, tables(source, "pbth"), SEED)
    per_vector = scales().reshape(PLANES, 1, 1, HEADS, 1)
    return fp8_oracle.convert(source.view(np.uint16), dtype, per_vector)


@pytest.mark.parametrize("num_bytes", [16, 22])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_converted_cache_is_checked_byte_by_byte(dtype: str, num_bytes: int) -> None:
    cache = converted_cache(dtype, num_bytes)
    options: dict[str, Any] = {"conversion": dtype, "inverse_scales": scales()}
    made = tables(cache, "pbth", vector_bytes=num_bytes, **options)
    assert find(made) == (0, NO_PAGE)
    cache[1, 3, 0, 2, num_bytes // 2 - 1] ^= 1
    cache[1, 3, 1, 0, 0] ^= 0x80
    cache[1, 4, 1, 0, 0:2] ^= 1
    assert find(made) == (4, BLOCKS + 3)


@pytest.mark.parametrize("wrong", ["dtype", "scales", "seed"])
def test_a_conversion_of_another_kind_is_found(wrong: str) -> None:
    cache = converted_cache("bfloat16", 16)
    dtype = "float16" if wrong == "dtype" else "bfloat16"
    inverse = scales()[::-1].copy() if wrong == "scales" else scales()
    made = tables(cache, "pbth", vector_bytes=16, conversion=dtype, inverse_scales=inverse)
    num_wrong, first_page = find(made, SEED + (wrong == "seed"))
    # Most bfloat16 patterns are far outside of what fp8 holds, and become 0 or 448 all the same.
    assert num_wrong > cache.size // 16
    assert first_page == 0


def test_a_converting_copy_passes_the_check() -> None:
    """[blocks, heads, tokens] in float16 to [blocks, tokens, heads] in fp8."""
    source, target = empty("pbht", 16), empty("pbth", 8)
    _core.pattern_fill_host(POOL, tables(source, "pbht"), SEED)
    segments = np.zeros((BLOCKS, 4), np.uint32)
    segments[:, :2] = np.arange(BLOCKS)[:, None]
    box = CopyBox(
        0,
        PLANES,
        0,
        BLOCKS,
        src_block_stride=source.strides[1],
        dst_block_stride=target.strides[1],
        outer_count=HEADS,
        outer_src_stride=source.strides[2],
        outer_dst_stride=target.strides[3],
        inner_count=TOKENS,
        inner_src_stride=source.strides[3],
        inner_dst_stride=target.strides[2],
        run_bytes=16,
        scale_plane_step=HEADS,
        outer_scale_step=1,
    )
    planes = [
        np.array([cache.ctypes.data + plane * cache.strides[0] for plane in range(2)], np.uint64)
        for cache in (source, target)
    ]
    options: dict[str, Any] = {"conversion": "float16", "inverse_scales": scales()}
    _core.paged_copy_host(POOL, core_tables(*planes, segments, [box], scales(), "float16"), True)
    assert find(tables(target, "pbth", vector_bytes=16, **options)) == (0, NO_PAGE)


def test_a_fill_with_a_conversion_is_refused() -> None:
    cache = empty("pbth", 8)
    made = tables(cache, "pbth", vector_bytes=16, conversion="bfloat16", inverse_scales=scales())
    with pytest.raises(InvalidUsage, match="fill the source and copy it"):
        _core.pattern_fill_host(POOL, made, SEED)
    assert not cache.any()


def make(**changes: Any) -> _core.PatternTables:
    one = np.zeros(1, np.uint64)
    arguments: dict[str, Any] = {
        "planes": one,
        "plane_keys": one,
        "offsets": one,
        "token_keys": one,
        "token_counts": np.ones(1, np.uint32),
        "token_stride": 0,
        "head_stride": 0,
        "num_heads": 1,
        "first_head": 0,
        "vector_bytes": 8,
    }
    return _core.PatternTables(**(arguments | changes))


TWO = np.zeros(2, np.uint64)
NO_SCALES = np.zeros(0, np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *[
            ({"vector_bytes": size}, f"vector of {size} bytes; use a multiple of 2")
            for size in (0, 1, 7, (1 << 62) + 2)
        ],
        ({"plane_keys": TWO}, "tables of planes have 1 and 2 entries"),
        ({"token_keys": TWO}, "tables of segments have 1 and 2 entries"),
        ({"token_counts": np.ones(2, np.uint32)}, "tables of segments have 1 and 2 entries"),
        ({"num_heads": 0}, "heads 0 to 0; use 1 or more below 4096"),
        ({"num_heads": 4097}, "heads 0 to 4097"),
        ({"first_head": 4096}, "heads 4096 to 4097"),
        ({"first_head": (1 << 32) - 1}, "heads 4294967295 to 4294967296"),
        ({"conversion": "int8"}, "conversion 'int8'"),
        ({"conversion": "bfloat16"}, "0 inverse scales for 1 planes of 1 heads"),
        ({"conversion": "bfloat16", "inverse_scales": NO_SCALES}, "0 inverse scales for"),
        ({"inverse_scales": np.ones(2, np.float32)}, "2 inverse scales for 1 planes of 1 heads"),
        (
            {"token_counts": np.full(1, 1 << 31, np.uint32), "vector_bytes": 10},
            "segment 0 has 2\\^32 words or more in a plane",
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    make()
    make(inverse_scales=NO_SCALES)
    with pytest.raises(InvalidUsage, match=message):
        make(**changes)


def test_arrays_of_another_dtype_are_refused() -> None:
    for name in ("planes", "plane_keys", "offsets", "token_keys", "token_counts"):
        with pytest.raises(TypeError, match="incompatible constructor arguments"):
            make(**{name: np.ones(1, np.int64)})
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        make(inverse_scales=np.ones(1, np.float64))
