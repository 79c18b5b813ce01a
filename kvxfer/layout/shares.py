"""Who sends what: which layers and heads one source rank sends to one destination rank.

Of H KV heads, rank r of P holds heads floor(r H / P) to ceil((r + 1) H / P) - 1, so that ranks may
hold the same head (replicas). Each rank *owns* the interval [r H / P, (r + 1) H / P) of the heads'
axis, and these intervals do not overlap. The layers of one pipeline stage are spread over the unit
that a head takes on this axis: layer ``i`` of ``n`` (counted in the stage) lies at head + (i + 1/2)
/ n, and the rank that owns this point sends it. So every (layer, head) has one sender, replicas
share the work evenly, and both sides know who sends what without asking. The latent of MLA is one
head that all ranks hold.
"""

from dataclasses import dataclass

from kvxfer.layout.ranks import KVShard


@dataclass(frozen=True, slots=True)
class Share:
    """Layers times heads, both numbered as in the whole model."""

    layers: range
    heads: range

    @property
    def size(self) -> int:
        """Pairs of a layer and a head."""
        return len(self.layers) * len(self.heads)


def shares(src: KVShard, dst: KVShard) -> tuple[Share, ...]:
    """What rank ``src`` sends to rank ``dst``; at most three boxes that do not overlap.

    Over all source ranks of a model every (layer, head) that ``dst`` holds occurs once. Both shards
    are of one model.
    """
    found: list[Share] = []
    for head in overlap(src.heads, dst.heads):
        layers = overlap(_owned_layers(src, head), dst.layers)
        if not layers:
            continue
        if found and found[-1].layers == layers and found[-1].heads.stop == head:
            found[-1] = Share(layers, range(found[-1].heads.start, head + 1))
        else:
            found.append(Share(layers, range(head, head + 1)))
    return tuple(found)


def _owned_layers(src: KVShard, head: int) -> range:
    """The layers of which ``src``, among the replicas of ``head``, is the sender."""
    num_layers, tp_size = len(src.layers), src.rank.tp_size
    num_heads = src.model.num_kv_heads

    def first_layer_from(rank: int) -> int:
        # The least i with head + (i + 1/2) / num_layers >= rank * num_heads / tp_size.
        ahead = rank * num_heads - head * tp_size
        layer = -((tp_size - 2 * num_layers * ahead) // (2 * tp_size))
        return min(max(layer, 0), num_layers)

    begin, end = (first_layer_from(src.rank.tp_rank + step) for step in (0, 1))
    return range(src.layers.start + begin, src.layers.start + end)


def overlap(one: range, other: range) -> range:
    """What two ranges of step 1 have in common; empty where they do not meet."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))
