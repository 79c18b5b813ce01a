"""From two views and two block tables to the tables that a copy walks."""

from collections.abc import Iterable, Sequence

from kvxfer.layout.block_map import BlockMap
from kvxfer.layout.block_table import Blocks
from kvxfer.layout.conversion import ToFp8
from kvxfer.layout.copy_plan import CopyPlan
from kvxfer.layout.route import Route
from kvxfer.layout.view import KVView


def plan(
    src: KVView,
    dst: KVView,
    src_blocks: Blocks,
    dst_blocks: Blocks,
    *,
    tokens: range | None = None,
    layers: Iterable[int] | None = None,
    convert: ToFp8 | None = None,
) -> CopyPlan:
    """Plan what rank ``src`` sends of a request to rank ``dst``.

    For many requests between the same two caches keep a `Route`, for one request between many
    ranks a `BlockMap`: this function makes both anew.

    Args:
        src: the cache that is read.
        dst: the cache that is written. Its order of axes, block size and number of blocks may
            differ, and each side may be any rank of any parallel layout.
        src_blocks: block ids ``[n]`` of the request in the order of its tokens, repeats allowed; or
            a `BlockTable` that does not begin at token 0; or `BlockTables`, one a group of layers.
        dst_blocks: the same of the destination, each block once.
        tokens: which tokens to move, such as those behind a prefix that ``dst`` holds already, up
            to the last in a block filled partly; None = all slots of the blocks, where both tables
            have equally many.
        layers: only these layers, numbered as in the whole model; None = all. Layers that slide
            move their window alone, counted back from the end of ``tokens``.
        convert: convert bfloat16 or float16 to fp8 on the way; None = the dtypes are equal.

    Returns:
        The plan; of 0 pages where ``src`` has nothing to send to ``dst``.

    Raises:
        LayoutMismatch: the models differ; names the first field that does.
        InvalidUsage: ids of another type or shape or outside their view, a destination named
            twice, tokens that the blocks do not hold, or layers that the model lacks.
    """
    # Layouts first: block ids of another model's cache mean nothing.
    route = Route(src, dst, layers=layers, convert=convert)
    return route.plan(match_blocks(src, dst, src_blocks, dst_blocks, tokens=tokens))


def match_blocks(
    src: KVView,
    dst: KVView,
    src_blocks: Blocks,
    dst_blocks: Blocks,
    *,
    tokens: range | Sequence[range] | None = None,
    end: int | None = None,
) -> BlockMap:
    """The `BlockMap` of a request for caches like these; arguments and errors as for that."""
    return BlockMap(
        src_blocks,
        dst_blocks,
        src_block_size=src.layout.block_size,
        dst_block_size=dst.layout.block_size,
        tokens=tokens,
        end=end,
        src_num_blocks=src.num_blocks,
        dst_num_blocks=dst.num_blocks,
    )
