"""Whether a group of peers is all that a transfer needs: no rank missing, none there twice."""

from collections import Counter
from collections.abc import Sequence

from kvxfer.errors import InvalidUsage
from kvxfer.layout import KVShard, TPLayout, shares
from kvxfer.transport import Op


def require_complete(near: KVShard, far: Sequence[KVShard], op: Op) -> None:
    """Check that ``far`` holds every rank that takes part in ``op`` with ``near``.

    Raises:
        InvalidUsage: a part of the cache has no rank, or more than one; names it.
    """
    sizes = sorted({shard.rank.tp_size for shard in far})
    if len(sizes) > 1:
        raise InvalidUsage(
            f"ranks of tp sizes {', '.join(map(str, sizes))} in one group; they are of different "
            "engines"
        )
    if op is Op.GET:
        _require_each_once(near, far)
    else:
        _require_receivers(near, far)


def _require_each_once(near: KVShard, far: Sequence[KVShard]) -> None:
    senders = Counter(
        (layer, head)
        for shard in far
        for share in shares(shard, near)
        for layer in share.layers
        for head in share.heads
    )
    for layer in near.layers:
        for head in near.heads:
            count = senders[layer, head]
            if count != 1:
                raise _wrong(count, "sender", f"layer {layer}, head {head}")


def _require_receivers(near: KVShard, far: Sequence[KVShard]) -> None:
    held = Counter((layer, shard.rank.tp_rank) for shard in far for layer in shard.layers)
    tp_size = far[0].rank.tp_size
    for tp_rank in range(tp_size):
        whole = KVShard(near.model, TPLayout(tp_size, tp_rank))
        for share in shares(near, whole):
            for layer in share.layers:
                count = held[layer, tp_rank]
                if count != 1:
                    raise _wrong(count, f"rank {tp_rank} of {tp_size}", f"layer {layer}")


def _wrong(count: int, who: str, what: str) -> InvalidUsage:
    if count == 0:
        return InvalidUsage(f"no {who} for {what} in this group; connect to all ranks that hold it")
    return InvalidUsage(
        f"{count} times {who} for {what} in this group; connect to each rank once, and check its "
        "layers"
    )
