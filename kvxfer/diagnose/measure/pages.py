"""Pages of a range of memory as tables of the core: to fill, to copy and to check."""

import numpy as np
from numpy.typing import NDArray

from kvxfer import _core
from kvxfer.layout import CopyPlan
from kvxfer.layout.copy_plan import CopyBox

Pages = NDArray[np.int64]
# The keys of two sources are farther apart than any range has pages.
_SOURCE_KEY_SHIFT = 48


def pattern_of(
    address: int, pages: Pages, source_pages: Pages, *, source: int, page_bytes: int
) -> _core.PatternTables:
    """The pattern of pages at ``address``, under the keys of the pages they were copied from.

    Args:
        address: of page 0.
        pages: where they are, int64 ``[n]``.
        source_pages: which pages of the source they were, int64 ``[n]``.
        source: a number of the source, 0 or more.
        page_bytes: of each.
    """
    return _core.PatternTables(
        np.array([address], np.uint64),
        np.array([(source + 1) << _SOURCE_KEY_SHIFT], np.uint64),
        (pages * page_bytes).astype(np.uint64),
        source_pages.astype(np.uint64),
        np.ones(pages.size, np.uint32),
        page_bytes,
        page_bytes,
        1,
        0,
        page_bytes,
    )


def paged_plan(
    src_address: int, dst_address: int, source_pages: Pages, pages: Pages, page_bytes: int
) -> CopyPlan:
    """Pages of one range to pages of another, in the order given."""
    segments = np.zeros((pages.size, 4), np.uint32)
    segments[:, 0], segments[:, 1] = source_pages, pages
    box = CopyBox(0, 1, 0, pages.size, page_bytes, page_bytes, 0, 0, 1, 0, 0, 1, 0, 0, page_bytes)
    return CopyPlan(
        np.array([src_address], np.uint64),
        np.array([dst_address], np.uint64),
        segments=segments,
        boxes=(box,),
    )
