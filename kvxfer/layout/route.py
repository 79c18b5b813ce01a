"""What one rank sends to another, worked out once and planned for any request.

The axes that both sides share are layer, K|V, token, head and the elements of a head. Layers and
K|V become *planes*, tokens become *segments* (cut where a block of either side ends), and what is
left inside a page is a strided box of at most two axes of rows. Axes that are contiguous on both
sides are merged into the run, so that equal layouts copy whole pages and a transposition copies
single vectors, by one rule.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidUsage
from kvxfer.layout import _checks
from kvxfer.layout.block_map import BlockMap
from kvxfer.layout.compatible import require_compatible
from kvxfer.layout.conversion import ToFp8
from kvxfer.layout.copy_plan import CopyBox, CopyPlan
from kvxfer.layout.shares import Share, shares
from kvxfer.layout.view import KVView


@dataclass(frozen=True, slots=True, eq=False)
class _Axis:
    """An axis inside a page, as long as it is not merged into the run."""

    count: int
    src_stride: int
    dst_stride: int
    scale_step: int = 0
    mergeable: bool = True  # not where its entries have scales of their own


_ONE_ROW = _Axis(1, 0, 0)


class _Kind(NamedTuple):
    """What decides which tokens of a layer move, and which blocks they lie in."""

    window: int
    src_group: int
    dst_group: int


@dataclass(frozen=True, slots=True)
class _Part:
    """The heads of a share in its layers of one kind; ``boxes`` by tokens of a segment."""

    kind: _Kind
    heads: _Axis
    kv: _Axis
    num_layers: int
    first_plane: int
    first_scale: int
    boxes: dict[int, CopyBox] = field(default_factory=dict)


class Route:
    """From the cache of one rank into that of another.

    Attributes:
        src: the cache that is read.
        dst: the cache that is written.
    """

    def __init__(
        self,
        src: KVView,
        dst: KVView,
        *,
        layers: Iterable[int] | None = None,
        convert: ToFp8 | None = None,
    ) -> None:
        """Work out what ``src`` sends to ``dst``.

        Args:
            src: the cache that is read.
            dst: the cache that is written.
            layers: only these, numbered as in the whole model; None = all.
            convert: convert bfloat16 or float16 to fp8 on the way; None = the dtypes are equal.

        Raises:
            LayoutMismatch: the models differ; names the first field that does.
            InvalidUsage: scales of another shape than the model, or layers that it lacks.
        """
        require_compatible(src.shard.model, dst.shard.model, convert)
        chosen_layers = _checks.layers(layers, src.shard.model.num_layers)
        self.src, self.dst = src, dst
        self._num_groups = (src.shard.model.num_groups, dst.shard.model.num_groups)
        self._convert = convert
        self._per_head = convert is not None and convert.per_head
        self._parts: list[_Part] = []
        planes: tuple[list[NDArray[np.uint64]], ...] = ([], [])
        scales: list[NDArray[np.float32]] = []
        for share in shares(src.shard, dst.shard):
            for kind, chosen in _by_kind(share, src, dst, chosen_layers):
                own = [_addresses(view, share, chosen) for view in (src, dst)]
                first_plane = sum(map(len, planes[0]))
                first_scale = sum(map(len, scales))
                self._parts.append(self._part(kind, share, own, first_plane, first_scale))
                # K of all layers, then V of all: where both merge into a run, the first half
                # serves.
                for side, addresses in zip(planes, own, strict=True):
                    side.append(addresses.T.reshape(-1))
                if convert is not None:
                    whole = convert.inverse_scales(src.shard.model, share)
                    scales.append(whole[:, chosen - share.layers.start].reshape(-1))
        self._src_planes, self._dst_planes = (_joined(side, np.uint64) for side in planes)
        self._scales = _joined(scales, np.float32)

    def plan(self, blocks: BlockMap) -> CopyPlan:
        """Plan one request. Plans share tables with the route and with ``blocks``.

        Raises:
            InvalidUsage: the tables are of other block sizes, or ids are outside a view.
        """
        self._require_blocks(blocks)
        placed: dict[tuple[range, int, int], list[tuple[int, int, int]]] = {}
        tables: list[NDArray[np.uint32]] = []
        boxes: list[CopyBox] = []
        num_segments = 0
        for part in self._parts:
            window, src_group, dst_group = part.kind
            key = (blocks.last_tokens(window, dst_group), src_group, dst_group)
            if key not in placed:
                placed[key] = []
                for segments in blocks.segments(*key):
                    count = len(segments.table)
                    placed[key].append((segments.num_tokens, num_segments, count))
                    tables.append(segments.table)
                    num_segments += count
            boxes += [
                self._box(part, num_tokens)._replace(first_segment=first, num_segments=count)
                for num_tokens, first, count in placed[key]
            ]
        return CopyPlan(
            self._src_planes,
            self._dst_planes,
            segments=tables[0] if len(tables) == 1 else _joined(tables, np.uint32, 4),
            boxes=tuple(boxes),
            inverse_scales=self._scales,
            conversion="none" if self._convert is None else self.src.layout.dtype,
        )

    def _require_blocks(self, blocks: BlockMap) -> None:
        sizes = (blocks.src_block_size, blocks.dst_block_size)
        wanted = (self.src.layout.block_size, self.dst.layout.block_size)
        if sizes != wanted:
            raise InvalidUsage(
                f"the block tables were matched for blocks of {sizes[0]} and {sizes[1]} tokens, "
                f"the caches have {wanted[0]} and {wanted[1]}; match them anew"
            )
        if blocks.num_tables != self._num_groups:
            raise InvalidUsage(
                f"{blocks.num_tables} block tables for caches whose layers form "
                f"{self._num_groups} groups (source, destination); give a table for each group, "
                "as BlockTables"
            )
        blocks.require_within(self.src.num_blocks, self.dst.num_blocks)

    def _part(
        self,
        kind: _Kind,
        share: Share,
        addresses: list[NDArray[np.uint64]],
        first_plane: int,
        first_scale: int,
    ) -> _Part:
        src, dst = self.src, self.dst
        heads = _Axis(
            len(share.heads),
            src.head_stride_bytes,
            dst.head_stride_bytes,
            scale_step=1 if self._per_head else 0,
            mergeable=not self._per_head,
        )
        num_layers, num_vectors = addresses[0].shape
        kv_strides = _kv_stride(addresses[0]), _kv_stride(addresses[1])
        kv = _Axis(num_vectors, *kv_strides, mergeable=self._convert is None)
        return _Part(kind, heads, kv, num_layers, first_plane, first_scale)

    def _box(self, part: _Part, num_tokens: int) -> CopyBox:
        """What is copied for each segment of so many tokens."""
        if num_tokens not in part.boxes:
            part.boxes[num_tokens] = self._new_box(part, num_tokens)
        return part.boxes[num_tokens]

    def _new_box(self, part: _Part, num_tokens: int) -> CopyBox:
        src, dst = self.src, self.dst
        tokens = _Axis(num_tokens, src.token_stride_bytes, dst.token_stride_bytes)
        axes = [axis for axis in (part.kv, part.heads, tokens) if axis.count > 1]
        run_bytes = _merge(axes, src.layout.vector_bytes, dst.layout.vector_bytes)
        num_vectors = part.kv.count if part.kv in axes else 1
        # The shorter stride at the source goes inside: neighbours are then read together, which
        # on a GPU is worth a third of the rate where few SMs transpose.
        rows = sorted((axis for axis in axes if axis is not part.kv), key=lambda a: -a.src_stride)
        outer, inner = [_ONE_ROW, _ONE_ROW, *rows][-2:]
        scale_plane_step = 0
        if self._convert is not None:
            scale_plane_step = part.heads.count if self._per_head else 1
        return CopyBox(
            first_plane=part.first_plane,
            num_planes=num_vectors * part.num_layers,
            first_segment=0,
            num_segments=0,
            src_block_stride=src.block_stride_bytes,
            dst_block_stride=dst.block_stride_bytes,
            src_slot_stride=src.token_stride_bytes,
            dst_slot_stride=dst.token_stride_bytes,
            outer_count=outer.count,
            outer_src_stride=outer.src_stride,
            outer_dst_stride=outer.dst_stride,
            inner_count=inner.count,
            inner_src_stride=inner.src_stride,
            inner_dst_stride=inner.dst_stride,
            run_bytes=run_bytes,
            first_scale=part.first_scale,
            scale_plane_step=scale_plane_step,
            outer_scale_step=outer.scale_step,
            inner_scale_step=inner.scale_step,
        )


def _by_kind(
    share: Share, src: KVView, dst: KVView, layers: frozenset[int] | None
) -> Iterator[tuple[_Kind, NDArray[np.intp]]]:
    """The layers of a share by kind: (kind, layers as the model numbers them)."""
    models = src.shard.model, dst.shard.model
    kinds: dict[_Kind, list[int]] = {}
    for layer in share.layers:
        if layers is None or layer in layers:
            kind = _Kind(models[0].window_of(layer), *(one.group_of(layer) for one in models))
            kinds.setdefault(kind, []).append(layer)
    for kind, chosen in kinds.items():
        yield kind, np.array(chosen, dtype=np.intp)


def _merge(axes: list[_Axis], src_run_bytes: int, dst_run_bytes: int) -> int:
    """Take out of ``axes`` what continues the run on both sides; the bytes of the run, as read."""
    merged = True
    while merged:
        merged = False
        for axis in axes:
            strides = (axis.src_stride, axis.dst_stride)
            if axis.mergeable and strides == (src_run_bytes, dst_run_bytes):
                src_run_bytes *= axis.count
                dst_run_bytes *= axis.count
                axes.remove(axis)
                merged = True
                break
    return src_run_bytes


def _joined(tables: list[NDArray[Any]], dtype: type, *row: int) -> NDArray[Any]:
    table = np.concatenate([np.empty((0, *row), dtype), *tables])
    table.setflags(write=False)
    return table


def _addresses(view: KVView, share: Share, layers: NDArray[np.intp]) -> NDArray[np.uint64]:
    """Where the first head of ``share`` begins in each of ``layers``, ``[layers, vectors]``."""
    head_bytes = (share.heads.start - view.shard.heads.start) * view.head_stride_bytes
    own = view.addresses[layers - view.shard.layers.start]
    moved: NDArray[np.uint64] = own + np.uint64(head_bytes)
    return moved


def _kv_stride(addresses: NDArray[np.uint64]) -> int:
    """Bytes from K to V where all layers agree on it, else 0."""
    if addresses.shape[1] == 1:
        return 0
    apart = addresses[:, 1] - addresses[:, 0]  # wraps where V is first, and then merges with none
    return int(apart[0]) if (apart == apart[0]).all() else 0
