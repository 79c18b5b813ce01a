"""Whether two names are of one model: people, records and servers spell them differently.

A name tells a shape where kvxfer knows it (``dummy:llama-3.1-8b``, ``openai/gpt-oss-120b``,
``tiny``). Shapes that differ are of two models; other names may still be of one.
"""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from kvxfer.layout.models import CATALOGUE, ModelShape
from kvxfer.pd.models.shapes import TINY

Relation: TypeAlias = Literal["same", "other", "unknown"]

_TINY: Final = ModelShape(
    "tiny",
    TINY["num_hidden_layers"],
    num_attention_heads=TINY["num_attention_heads"],
    num_kv_heads=TINY["num_key_value_heads"],
    head_dim=TINY["head_dim"],
)
_KNOWN: Final = {**CATALOGUE, _TINY.name: _TINY}


@dataclass(frozen=True, slots=True)
class Model:
    """A model as somebody names it; ``shape`` None: not known by that name."""

    name: str
    shape: ModelShape | None

    @classmethod
    def named(cls, name: str) -> "Model":
        """By its name alone."""
        return cls(name, _KNOWN.get(_plain(name)))

    @classmethod
    def of(cls, shape: ModelShape) -> "Model":
        """One whose shape was read."""
        return cls(shape.name, shape)

    def __str__(self) -> str:
        if self.shape is None:
            return self.name
        heads = "MLA" if self.shape.kind == "mla" else f"{self.shape.num_kv_heads} KV heads"
        return f"{self.name} ({self.shape.num_layers} layers, {heads} of {self.shape.head_dim})"


def relation(one: Model, other: Model) -> Relation:
    """``other`` where both shapes are known and differ, ``same`` where the names say so."""
    if one.shape and other.shape and _kv(one.shape) != _kv(other.shape):
        return "other"
    return "same" if _plain(one.name) == _plain(other.name) else "unknown"


def _plain(name: str) -> str:
    """Without what tells where it came from: ``dummy:``, an owner, folders."""
    return name.removeprefix("dummy:").rstrip("/").rpartition("/")[2].lower()


def _kv(shape: ModelShape) -> tuple[str, int, int, int]:
    return shape.kind, shape.num_layers, shape.num_kv_heads, shape.head_dim
