"""The shapes of models that decide how many bytes their KV takes."""

import difflib
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, cast

from kvxfer.errors import InvalidUsage
from kvxfer.layout import _checks
from kvxfer.layout._config import read_config, shape_fields
from kvxfer.layout.kv_layout import KVKind, KVLayout, Order


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides the size of its KV cache.

    Args:
        name: a label for people.
        num_layers: layers that hold KV.
        num_attention_heads: query heads a layer; the limit of tensor parallelism.
        num_kv_heads: KV heads a layer; 1 for MLA.
        head_dim: elements of a head; for MLA the latent dimension (rank + rotary part).
        kind: ``gqa`` for any attention with K and V heads, or ``mla``.
        windows: for each layer the tokens that it looks back, 0 = all of them; empty = no layer
            slides.
        max_tokens: most tokens of a request, prompt and reply, as the model was trained or scaled
            for; None = not known.

    Raises:
        InvalidUsage: a field is outside its limits.
    """

    name: str
    num_layers: int
    _: KW_ONLY
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    kind: Literal["gqa", "mla"] = "gqa"
    windows: tuple[int, ...] = ()
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_attention_heads", "num_kv_heads", "head_dim"):
            object.__setattr__(self, field, _checks.dimension(field, getattr(self, field)))
        if self.kind not in ("gqa", "mla"):
            raise InvalidUsage(f"kind is {self.kind!r}; use one of 'gqa', 'mla'")
        if self.kind == "mla" and self.num_kv_heads != 1:
            raise InvalidUsage(f"num_kv_heads is {self.num_kv_heads}; MLA has one latent, so use 1")
        windows = _checks.windows(self.windows, num_layers=self.num_layers)
        object.__setattr__(self, "windows", windows)
        if self.max_tokens is not None:
            max_tokens = _checks.dimension("max_tokens", self.max_tokens)
            object.__setattr__(self, "max_tokens", max_tokens)

    @property
    def sliding_layers(self) -> int:
        """How many layers slide."""
        return sum(map(bool, self.windows))

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a sliding layer looks back, the longest of them; None where none slides."""
        return max(self.windows, default=None)

    def kv_layout(
        self,
        *,
        block_size: int = 16,
        dtype: str = "bfloat16",
        order: Order | str = "nhd",
        windowed: bool = False,
    ) -> KVLayout:
        """The layout of the whole model's cache; `TPLayout.rank_layout` gives one rank's part.

        Args:
            block_size: tokens a block.
            dtype: a name of `DTYPE_BYTES` or an alias.
            order: order of the axes inside a page.
            windowed: sliding layers need their window alone; False where an engine keeps all tokens
                of every layer.

        Raises:
            InvalidUsage: an argument is outside its limits.
        """
        return KVLayout(
            self.num_layers,
            self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            block_size=block_size,
            order=_checks.member("order", order, of=Order),
            kv=KVKind.MLA if self.kind == "mla" else KVKind.SPLIT,
            windows=self.windows if windowed else (),
        )

    def windowed_request_bytes(self, layout: KVLayout, num_tokens: int) -> int:
        """Bytes of a request where sliding layers keep only their window.

        Args:
            layout: all layers of this model, of the whole model or of one tensor-parallel rank.
            num_tokens: tokens of the request.

        Raises:
            InvalidUsage: the layout has another number of layers, or ``num_tokens`` is no integer
                of 0 or more.
        """
        if layout.num_layers != self.num_layers:
            raise InvalidUsage(
                f"the layout has {layout.num_layers} layers and {self.name} {self.num_layers}; "
                "give one of all layers"
            )
        windows = self.windows or (0,) * self.num_layers
        return sum(layout.layer_bytes(min(num_tokens, window or num_tokens)) for window in windows)


# Source: the public config.json of each model.
_MODELS = (
    ModelShape(
        "llama-3.1-8b",
        32,
        num_attention_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_tokens=131_072,
    ),
    ModelShape(
        "llama-3.3-70b",
        80,
        num_attention_heads=64,
        num_kv_heads=8,
        head_dim=128,
        max_tokens=131_072,
    ),
    ModelShape(
        "llama-3.1-405b",
        126,
        num_attention_heads=128,
        num_kv_heads=8,
        head_dim=128,
        max_tokens=131_072,
    ),
    ModelShape(
        "qwen3-32b", 64, num_attention_heads=64, num_kv_heads=8, head_dim=128, max_tokens=40_960
    ),
    ModelShape(
        "qwen2.5-7b", 28, num_attention_heads=28, num_kv_heads=4, head_dim=128, max_tokens=131_072
    ),
    ModelShape(
        "gpt-oss-120b",
        36,
        num_attention_heads=64,
        num_kv_heads=8,
        head_dim=64,
        windows=(128, 0) * 18,
        max_tokens=131_072,
    ),
    ModelShape(
        "deepseek-v3",
        61,
        num_attention_heads=128,
        num_kv_heads=1,
        head_dim=576,
        kind="mla",
        max_tokens=163_840,
    ),
)

CATALOGUE: Final[Mapping[str, ModelShape]] = MappingProxyType(
    {model.name: model for model in _MODELS}
)
"""Well-known models by lower-case name."""


def load_model(name_or_path: str | Path) -> ModelShape:
    """Find a model by catalogue name, or read it from a Hugging Face ``config.json``.

    Args:
        name_or_path: a name of `CATALOGUE` in any case, a config file, or the directory of one. A
            catalogue name wins over a path of the same spelling; write ``./name`` for the path.

    Raises:
        InvalidUsage: no such model or file, or the file is too large, no regular file, no JSON
            object, lacks fields, or describes a cache that this arithmetic does not cover.
    """
    text = str(name_or_path)
    known = CATALOGUE.get(text.lower())
    if known is not None:
        return known
    path = Path(name_or_path)
    try:
        is_directory, exists = path.is_dir(), path.exists()
    except (OSError, ValueError):  # a name too long for a path, or with a NUL
        is_directory = exists = False
    if not exists:
        raise _unknown_model(text)
    return _from_config(path / "config.json" if is_directory else path)


def _from_config(path: Path) -> ModelShape:
    found = shape_fields(read_config(path), source=str(path))
    name = path.absolute().parent.name if path.name == "config.json" else path.stem
    try:
        return ModelShape(
            name or "model",
            found.num_layers,
            num_attention_heads=found.num_attention_heads,
            num_kv_heads=found.num_kv_heads,
            head_dim=found.head_dim,
            kind=cast(Literal["gqa", "mla"], found.kind),
            windows=found.windows,
            max_tokens=found.max_tokens,
        )
    except InvalidUsage as error:
        raise InvalidUsage(f"{path}: {error}") from None


def _unknown_model(text: str) -> InvalidUsage:
    shown = text if len(text) <= 200 else text[:200] + "..."
    last_part = text.lower().rstrip("/").rpartition("/")[2][:200]
    near = difflib.get_close_matches(last_part, CATALOGUE, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return InvalidUsage(
        f"{shown!r} is neither a known model nor an existing path; {hint}known models: "
        f"{', '.join(CATALOGUE)}; or give the path of a config.json"
    )
