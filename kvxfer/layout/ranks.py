"""Which layers and heads of a model's KV cache one rank holds."""

from dataclasses import KW_ONLY, dataclass, field, replace

from kvxfer.errors import InvalidUsage
from kvxfer.layout import _checks
from kvxfer.layout.kv_layout import KVKind, KVLayout


@dataclass(frozen=True, slots=True)
class TPLayout:
    """One rank of a tensor-parallel and pipeline-parallel grid.

    Args:
        tp_size: ranks that share the heads.
        tp_rank: this rank among them, 0 .. tp_size - 1.
        pp_size: ranks that share the layers.
        pp_rank: this rank among them, 0 .. pp_size - 1.
        layers: (first, end) of this rank's layers, for engines that share them in another way than
            `layers_of` does.

    Raises:
        InvalidUsage: a field is outside its limits.
    """

    tp_size: int = 1
    tp_rank: int = 0
    _: KW_ONLY
    pp_size: int = 1
    pp_rank: int = 0
    layers: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.layers is not None:
            if not isinstance(self.layers, tuple) or len(self.layers) != 2:
                raise InvalidUsage(f"layers is {self.layers!r}; use (first, end)")
            first, end = self.layers
            end = _checks.integer("layers[1]", end, minimum=1, maximum=_checks.MAX_DIMENSION)
            first = _checks.integer("layers[0]", first, minimum=0, maximum=end - 1)
            object.__setattr__(self, "layers", (first, end))
        for axis in ("tp", "pp"):
            size = _checks.dimension(f"{axis}_size", getattr(self, f"{axis}_size"))
            rank = getattr(self, f"{axis}_rank")
            checked = _checks.integer(f"{axis}_rank", rank, minimum=0, maximum=size - 1)
            object.__setattr__(self, f"{axis}_size", size)
            object.__setattr__(self, f"{axis}_rank", checked)

    @classmethod
    def all_of(cls, tp_size: int, pp_size: int) -> "tuple[TPLayout, ...]":
        """All ranks of a grid, those of the first pipeline stage first.

        Raises:
            InvalidUsage: a size is outside its limits.
        """
        return tuple(
            cls(tp_size, tp_rank, pp_size=pp_size, pp_rank=pp_rank)
            for pp_rank in range(pp_size)
            for tp_rank in range(tp_size)
        )

    def heads_of(self, num_kv_heads: int) -> range:
        """The KV heads of this rank, a contiguous range that is never empty.

        Where ``tp_size`` does not divide the heads, neighbours share the head that the boundary
        cuts; where it exceeds them, heads are replicated.

        Raises:
            InvalidUsage: ``num_kv_heads`` is no integer of 1 or more.
        """
        heads = _checks.dimension("num_kv_heads", num_kv_heads)
        begin = self.tp_rank * heads // self.tp_size
        end = -(-(self.tp_rank + 1) * heads // self.tp_size)
        return range(begin, end)

    def layers_of(self, num_layers: int) -> range:
        """The layers of this rank, a contiguous range.

        The first ``num_layers % pp_size`` ranks hold one layer more than the rest, unless
        ``layers`` says otherwise.

        Raises:
            InvalidUsage: fewer layers than pipeline ranks, or than ``layers`` names.
        """
        layers = _checks.dimension("num_layers", num_layers)
        if self.layers is not None:
            if self.layers[1] > layers:
                raise InvalidUsage(
                    f"layers end at {self.layers[1]} in a model of {layers}; use at most {layers}"
                )
            return range(*self.layers)
        if layers < self.pp_size:
            raise InvalidUsage(
                f"pp_size is {self.pp_size} for {layers} layers; use at most one rank a layer"
            )
        share, extra = divmod(layers, self.pp_size)
        begin = self.pp_rank * share + min(self.pp_rank, extra)
        return range(begin, begin + share + (1 if self.pp_rank < extra else 0))

    def rank_layout(self, layout: KVLayout) -> KVLayout:
        """The layout of this rank's part of ``layout``; MLA latents are replicated.

        Raises:
            InvalidUsage: fewer layers than pipeline ranks.
        """
        replicated = layout.kv is KVKind.MLA
        heads = 1 if replicated else len(self.heads_of(layout.num_kv_heads))
        layers = self.layers_of(layout.num_layers)
        own = slice(layers.start, layers.stop)
        return replace(
            layout,
            num_layers=len(layers),
            num_kv_heads=heads,
            windows=layout.windows[own],
            groups=layout.groups[own],
        )


@dataclass(frozen=True, slots=True)
class KVShard:
    """One rank's part of a model's KV cache.

    Args:
        model: the whole model's layout.
        rank: which part; by default all of it.

    Attributes:
        layout: the shape of this part alone.
        layers: the layers that it holds, as the model numbers them.
        heads: the KV heads that it holds, as the model numbers them; ``range(1)`` for MLA.

    Raises:
        InvalidUsage: the model has fewer layers than the rank needs.
    """

    model: KVLayout
    rank: TPLayout = TPLayout()
    layout: KVLayout = field(init=False, compare=False)
    layers: range = field(init=False, compare=False)
    heads: range = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", self.rank.rank_layout(self.model))
        object.__setattr__(self, "layers", self.rank.layers_of(self.model.num_layers))
        object.__setattr__(self, "heads", self.rank.heads_of(self.model.num_kv_heads))
