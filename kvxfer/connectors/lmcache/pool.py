"""LMCache's pool of pages as kvxfer sees it: blocks of one range, moved whole or in part."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvxfer.closing import Closing
from kvxfer.errors import InvalidUsage, ProtocolMismatch
from kvxfer.layout import CopyBox, CopyPlan, KVKind, KVLayout
from kvxfer.memory import KVCache
from kvxfer.transport import Op

_MAX_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages to move, by their numbers on both sides.

    Attributes:
        near: numbers in this pool.
        far: numbers in the peer's, as many.
        num_bytes: how much of each is used, from its start.
    """

    near: Sequence[int]
    far: Sequence[int]
    num_bytes: Sequence[int]


class _Range:
    """Memory of another library, whose life is that library's business."""

    def __init__(self, address: int, num_bytes: int, *, is_device: bool) -> None:
        name = "__cuda_array_interface__" if is_device else "__array_interface__"
        description = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }
        setattr(self, name, description)


class PagePool(Closing):
    """A pool, registered. A context manager.

    Attributes:
        cache: the pool as a cache of one layer, a page a block.
        page_bytes: bytes of a page.
        num_pages: pages.
    """

    def __init__(self, address: int, num_bytes: int, page_bytes: int, *, is_device: bool) -> None:
        """Register ``num_bytes`` bytes at ``address``.

        Raises:
            InvalidUsage: not whole pages, or not memory that pages can be moved from.
            RegistrationError: it overlaps memory that is registered otherwise.
        """
        if page_bytes < 1 or num_bytes % page_bytes:
            raise InvalidUsage(
                f"a pool of {num_bytes} bytes is not whole pages of {page_bytes}; round it down"
            )
        self.page_bytes, self.num_pages = page_bytes, num_bytes // page_bytes
        self.cache = KVCache(_layout(page_bytes), _Range(address, num_bytes, is_device=is_device))

    @property
    def address(self) -> int:
        """Where the first page lies."""
        return int(self.cache.view.addresses[0, 0])

    def plan(self, pages: Pages, op: Op, far_address: int, far_pages: int) -> CopyPlan:
        """The copy of ``pages`` to or from a pool of ``far_pages`` pages at ``far_address``.

        Raises:
            ProtocolMismatch: a number outside a pool, or a page that would be written twice.
            InvalidUsage: unequal numbers of pages, or more bytes than a page has.
        """
        self._require_legal(pages, far_pages)
        near, far = (self.address, pages.near), (far_address, pages.far)
        (src, src_pages), (dst, dst_pages) = (near, far) if op is Op.PUT else (far, near)
        segments = np.zeros((len(pages.near), 4), np.uint32)
        segments[:, 0], segments[:, 1] = src_pages, dst_pages
        return CopyPlan(
            np.array([src], np.uint64),
            np.array([dst], np.uint64),
            segments=segments,
            boxes=tuple(self._boxes(pages.num_bytes)),
        )

    def close(self) -> None:
        """Give up the registration; may be called more than once."""
        self.cache.close()

    def _boxes(self, sizes: Sequence[int]) -> list[CopyBox]:
        boxes, first, page = [], 0, self.page_bytes
        for size, run in itertools.groupby(sizes):
            count = sum(1 for _ in run)
            boxes.append(CopyBox(0, 1, first, count, page, page, 0, 0, 1, 0, 0, 1, 0, 0, size))
            first += count
        return boxes

    def _require_legal(self, pages: Pages, far_pages: int) -> None:
        count = len(pages.near)
        if len(pages.far) != count or len(pages.num_bytes) != count:
            raise InvalidUsage(
                f"{count} objects, {len(pages.far)} pages of the peer; give one for each"
            )
        for side, numbers, limit in (
            ("this pool", pages.near, self.num_pages),
            ("the peer's pool", pages.far, far_pages),
        ):
            outside = [one for one in numbers if not 0 <= one < limit]
            if outside:
                raise ProtocolMismatch(f"page {outside[0]} of {side}, which has {limit}")
            if len(set(numbers)) != count:
                raise ProtocolMismatch(f"a page of {side} is named twice among {count}")
        wrong = [size for size in pages.num_bytes if not 0 < size <= self.page_bytes]
        if wrong:
            raise InvalidUsage(f"{wrong[0]} bytes of a page, which has {self.page_bytes}")


def _layout(page_bytes: int) -> KVLayout:
    tokens = min(page_bytes & -page_bytes, _MAX_TOKENS)
    return KVLayout(
        1, 1, head_dim=page_bytes // tokens, dtype="uint8", block_size=tokens, kv=KVKind.MLA
    )


def pages_of(objects: Sequence[Any], far: Sequence[int]) -> Pages:
    """LMCache's memory objects as pages."""
    return Pages(
        [one.meta.address for one in objects], far, [one.meta.get_size() for one in objects]
    )
