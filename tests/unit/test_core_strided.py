"""Strided boxes on CPU threads, against numpy's fancy indexing."""

from dataclasses import dataclass
from typing import Any

import fp8_oracle
import numpy as np
import pytest
from copy_boxes import (
    CopyBox,
    byte_index,
    copied_boxes,
    core_tables,
    row_index,
    scale_index,
)
from host_copies import ENGINES, POSSIBLE, copy
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray


@dataclass
class Case:
    """Two memories of random bytes and boxes between them; what no box writes is a guard."""

    source: NDArray[np.uint8]
    target: NDArray[np.uint8]
    src_planes: list[int]
    dst_planes: list[int]
    segments: NDArray[np.uint32]
    boxes: list[CopyBox]
    inverse_scales: NDArray[np.float32]

    def tables(self, conversion: str = "none") -> Any:
        planes = [
            np.array(offsets, np.uint64) + np.uint64(memory.ctypes.data)
            for memory, offsets in (
                (self.source, self.src_planes),
                (self.target, self.dst_planes),
            )
        ]
        scales = self.inverse_scales
        return core_tables(*planes, self.segments, self.boxes, scales, conversion)

    def expected(self) -> Any:
        return copied_boxes(
            self.source, self.target, self.src_planes, self.dst_planes, self.segments, self.boxes
        )

    def expected_converted(self, dtype: str) -> Any:
        result = self.target.copy()
        for box in self.boxes:
            src = byte_index(row_index(box, "src", self.src_planes, self.segments), box.run_bytes)
            dst = row_index(box, "dst", self.dst_planes, self.segments)
            scales = self.inverse_scales[scale_index(box)][..., None]
            codes = fp8_oracle.convert(self.source[src].view(np.uint16), dtype, scales)
            result[byte_index(dst, box.run_bytes // 2)] = codes
        return result

    def check(self, engine: str, num_threads: int) -> None:
        expected, source = self.expected(), self.source.copy()
        tables = self.tables()
        assert tables.num_bytes == sum(
            box.num_planes * box.num_segments * box.outer_count * box.inner_count * box.run_bytes
            for box in self.boxes
        )
        copy(tables, engine, num_threads)
        assert np.array_equal(self.target, expected)
        assert np.array_equal(self.source, source)


def nested_strides(
    random_: np.random.Generator, counts: dict[str, int], run_bytes: int, step: int
) -> tuple[dict[str, int], int]:
    """Strides of axes nested in a random order, so that no two places overlap; and their extent."""
    extent = -(-run_bytes // step) * step + step * int(random_.integers(0, 2))
    strides = {}
    for axis in random_.permutation(list(counts)):
        strides[str(axis)] = extent
        extent = extent * counts[str(axis)] + step * int(random_.integers(0, 2))
    return strides, extent


def make_segments(
    random_: np.random.Generator, num_segments: int, num_blocks: int, num_slots: int
) -> NDArray[np.uint32]:
    """Segments on places (block, slot) that differ, in an order of their own on either side."""
    src, dst = (random_.permutation(num_blocks * num_slots)[:num_segments] for _ in range(2))
    columns = [src // num_slots, dst // num_slots, src % num_slots, dst % num_slots]
    return np.stack(columns, axis=1).astype(np.uint32)


def make_case(
    seed: int,
    num_planes: list[int],
    num_segments: int,
    rows: tuple[int, int],
    run_bytes: int,
    *,
    step: int = 1,
    shrink: int = 1,
) -> Case:
    """A box for each entry of ``num_planes``, each with a row grid, strides and planes of its own.

    ``step`` divides every destination address; a run has ``1 / shrink`` of its bytes there.
    """
    random_ = np.random.default_rng(seed)
    num_slots = int(random_.integers(1, 4))
    num_blocks = -(-num_segments // num_slots) + 1
    boxes: list[CopyBox] = []
    planes: dict[str, list[int]] = {"src": [], "dst": []}
    sizes = {"src": 64, "dst": 64}
    num_scales = 0
    for count in num_planes:
        outer, inner = random_.permutation(rows).tolist()
        counts = {"block": num_blocks, "slot": num_slots, "outer": outer, "inner": inner}
        first_segment = int(random_.integers(0, num_segments + 1))
        box = CopyBox(
            len(planes["src"]),
            count,
            first_segment,
            num_segments - first_segment,
            outer_count=outer,
            inner_count=inner,
            run_bytes=run_bytes,
            first_scale=num_scales,
            scale_plane_step=int(random_.integers(0, 3)),
            outer_scale_step=inner,
            inner_scale_step=1,
        )
        for side, run, align in (("src", run_bytes, 2), ("dst", run_bytes // shrink, step)):
            strides, extent = nested_strides(random_, counts, run, align)
            extent = -(-extent // align) * align
            planes[side] += [sizes[side] + plane * extent for plane in range(count)]
            sizes[side] += count * extent
            box = box._replace(
                **{f"{side}_{axis}_stride": strides[axis] for axis in ("block", "slot")},
                **{f"{axis}_{side}_stride": strides[axis] for axis in ("outer", "inner")},
            )
        boxes.append(box)
        num_scales = max(num_scales, int(scale_index(box).max(initial=0)) + 1)
    segments = make_segments(random_, num_segments, num_blocks, num_slots)
    memory = [random_.integers(0, 256, sizes[side] + 128, np.uint8) for side in ("src", "dst")]
    aligned = [one[-one.ctypes.data % 64 :] for one in memory]
    scales = (2.0 ** random_.uniform(-6, 6, num_scales)).astype(np.float32)
    return Case(*aligned, planes["src"], planes["dst"], segments, boxes, scales)


@settings(max_examples=200)
@given(
    seed=st.integers(0, 1 << 30),
    num_planes=st.lists(st.integers(0, 3), max_size=3),
    num_segments=st.integers(0, 9),
    rows=st.tuples(st.integers(1, 5), st.integers(1, 7)),
    run=st.one_of(
        st.tuples(st.integers(1, 100), st.just(1)),
        st.tuples(st.sampled_from([64, 128, 192, 320, 1024]), st.sampled_from([1, 16, 64])),
    ),
    engine=st.sampled_from(POSSIBLE),
    num_threads=st.integers(1, 5),
)
def test_any_boxes_agree_with_the_oracle(
    seed: int,
    num_planes: list[int],
    num_segments: int,
    rows: tuple[int, int],
    run: tuple[int, int],
    engine: str,
    num_threads: int,
) -> None:
    case = make_case(seed, num_planes, num_segments, rows, run[0], step=run[1])
    case.check(engine, num_threads)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 1 << 30),
    num_planes=st.lists(st.integers(0, 3), max_size=3),
    num_segments=st.integers(0, 6),
    rows=st.tuples(st.integers(1, 5), st.integers(1, 7)),
    num_elements=st.integers(1, 80),
    dtype=st.sampled_from(["bfloat16", "float16"]),
    engine=st.sampled_from(POSSIBLE),
    num_threads=st.integers(1, 4),
)
def test_any_conversion_agrees_with_the_oracle(
    seed: int,
    num_planes: list[int],
    num_segments: int,
    rows: tuple[int, int],
    num_elements: int,
    dtype: str,
    engine: str,
    num_threads: int,
) -> None:
    case = make_case(seed, num_planes, num_segments, rows, 2 * num_elements, shrink=2)
    expected = case.expected_converted(dtype)
    tables = case.tables(dtype)
    assert 2 * tables.num_bytes == case.tables().num_bytes
    copy(tables, engine, num_threads)
    assert np.array_equal(case.target, expected)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("run_bytes", "rows"), [(64, (13, 11)), (64, (143, 1)), (256, (13, 11)), (96 << 10, (3, 2))]
)
def test_few_large_pages_are_cut_among_the_threads(
    run_bytes: int, rows: tuple[int, int], engine: str, num_threads: int
) -> None:
    for seed in range(4):
        make_case(seed, [1], 2, rows, run_bytes, step=64).check(engine, num_threads)


@pytest.mark.parametrize("engine", ENGINES)
def test_boxes_of_very_unequal_sizes(engine: str) -> None:
    large = make_case(1, [2], 3, (4, 4), 4096, step=64)
    small = make_case(2, [1, 1, 2], 5, (1, 1), 8)
    shift = [large.source.size, large.target.size, len(large.src_planes), len(large.segments)]
    moved = [
        box._replace(
            first_plane=box.first_plane + shift[2], first_segment=box.first_segment + shift[3]
        )
        for box in small.boxes
    ]
    Case(
        np.concatenate([large.source, small.source]),
        np.concatenate([large.target, small.target]),
        large.src_planes + [plane + shift[0] for plane in small.src_planes],
        large.dst_planes + [plane + shift[1] for plane in small.dst_planes],
        np.concatenate([large.segments, small.segments]),
        moved + large.boxes,
        large.inverse_scales,
    ).check(engine, 3)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("row_bytes", [64, 128, 256])
def test_heads_and_tokens_change_places(engine: str, row_bytes: int) -> None:
    """[blocks, heads, tokens] to [blocks, tokens, heads], by transposing an array."""
    heads, tokens, num_blocks = 8, 16, 12
    random_ = np.random.default_rng(1)
    source = random_.integers(0, 256, (num_blocks, heads, tokens, row_bytes), np.uint8)
    target = np.zeros((num_blocks, tokens, heads, row_bytes), np.uint8)
    segments = np.zeros((num_blocks, 4), np.uint32)
    segments[:, 0] = random_.permutation(num_blocks)
    segments[:, 1] = random_.permutation(num_blocks)
    page = heads * tokens * row_bytes
    box = CopyBox(
        0,
        1,
        0,
        num_blocks,
        src_block_stride=page,
        dst_block_stride=page,
        outer_count=tokens,
        outer_src_stride=row_bytes,
        outer_dst_stride=heads * row_bytes,
        inner_count=heads,
        inner_src_stride=tokens * row_bytes,
        inner_dst_stride=row_bytes,
        run_bytes=row_bytes,
    )
    addresses = [np.array([one.ctypes.data], np.uint64) for one in (source, target)]
    copy(core_tables(*addresses, segments, [box]), engine, 2)
    expected = np.zeros_like(target)
    expected[segments[:, 1]] = source[segments[:, 0]].swapaxes(1, 2)
    assert np.array_equal(target, expected)


def test_the_oracle_sees_a_row_in_the_wrong_place() -> None:
    case = make_case(5, [2], 4, (3, 4), 16, step=1)
    expected = case.expected()
    box = case.boxes[0]
    case.boxes = [box._replace(inner_src_stride=box.inner_src_stride + 2)]
    copy(case.tables(), "memcpy", 1)
    assert not np.array_equal(case.target, expected)
