"""A model and a number of ranks out of options, checked against each other."""

import re
from dataclasses import replace
from typing import Final

from kvxfer.cli.side_spec import Side
from kvxfer.errors import InvalidUsage
from kvxfer.layout import ModelShape, load_model

_MAX_RANKS: Final = 256


def whole_number(option: str, text: str, least: int, most: int) -> int:
    """A whole number of an option.

    Raises:
        InvalidUsage: it is none, or out of range.
    """
    if not re.fullmatch("[0-9]{1,18}", text) or not least <= int(text) <= most:
        raise InvalidUsage(f"{option}: {text!r} is not a whole number of {least} .. {most}")
    return int(text)


def model_of(name: str, kv_heads: str | None) -> ModelShape:
    """A model, with another number of KV heads where one is given.

    Raises:
        InvalidUsage: an unknown model, or a number that it cannot have.
    """
    model = load_model(name)
    if kv_heads is None:
        return model
    if model.kind == "mla":
        raise InvalidUsage(f"--kv-heads: {model.name} has one latent (MLA); leave --kv-heads")
    most = model.num_attention_heads
    return replace(model, num_kv_heads=whole_number("--kv-heads", kv_heads, 1, most))


def require_ranks(option: str, side: Side, model: ModelShape) -> None:
    """Check that a model can have as many ranks.

    Raises:
        InvalidUsage: it cannot.
    """
    # Ranks share the query heads, so more ranks than those cannot run.
    if side.tp > model.num_attention_heads:
        raise InvalidUsage(
            f"{option}: tp is {side.tp}; {model.name} has {model.num_attention_heads} attention "
            f"heads, so use 1 .. {model.num_attention_heads}"
        )
    if side.pp > model.num_layers:
        raise InvalidUsage(
            f"{option}: pp is {side.pp}; {model.name} has {model.num_layers} layers, so use "
            f"1 .. {model.num_layers}"
        )
    if side.tp * side.pp > _MAX_RANKS:
        raise InvalidUsage(
            f"{option}: tp x pp is {side.tp * side.pp} ranks; use at most {_MAX_RANKS}"
        )
