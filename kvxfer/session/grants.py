"""Whether the tables of a grant are those that a request needs; both sides ask."""

from collections.abc import Sequence

from kvxfer.layout import KVLayout


def misfit(layout: KVLayout, tokens: range, granted: Sequence[tuple[int, int]]) -> str:
    """Why tables do not fit a request of ``tokens`` in a cache of ``layout``; empty where they do.

    A table may begin behind the first block that its group needs, at a whole block: its engine has
    what lies before.

    Args:
        layout: the whole model's, on the side that grants.
        tokens: which tokens are sent.
        granted: for each group the number of its blocks and its first token.
    """
    needed, size = layout.needed_blocks(tokens), layout.block_size
    if len(granted) != len(needed):
        return f"{len(granted)} block tables for {len(needed)} groups of layers"
    for group, (blocks, (num_blocks, first)) in enumerate(zip(needed, granted, strict=True)):
        wanted = max(blocks.stop - first // size, 0)
        if num_blocks != wanted or first % size or first < blocks.start * size:
            return (
                f"{num_blocks} blocks from token {first} for tokens {tokens.start} to "
                f"{tokens.stop} of group {group}; give {wanted} blocks of {size} tokens, from a "
                f"whole block at token {blocks.start * size} or later on"
            )
    return ""
