"""Reads a Hugging Face ``config.json``: the few fields that decide the size of a KV cache.

The file is untrusted: it may be anything of any size. A model whose cache is not one KV entry a
token and layer is refused rather than given a plausible, wrong figure.
"""

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kvxfer.errors import InvalidUsage
from kvxfer.layout import _checks

MAX_CONFIG_BYTES = 4 << 20

Config: TypeAlias = Mapping[str, object]

_NESTED = ("text_config", "llm_config")
_LAYERS = ("num_hidden_layers", "n_layer")
_HEADS = ("num_attention_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HIDDEN = ("hidden_size", "n_embd")
_MAX_TOKENS = ("max_position_embeddings", "n_positions")
_COUNTED_ROPES = ("llama3", "longrope", "su")

# Some layers of these models keep a recurrent state, or share the KV of another layer.
_UNCOVERED = (
    "attn_layer_period",
    "full_attention_interval",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_attn_config",
    "num_kv_shared_layers",
)
# Every n-th layer is a full one in these families, whose older configs do not say so; the last of
# each n, as Hugging Face numbers them.
_SLIDING_PATTERN = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
_FULL_LAYERS = ("full_attention", "chunked_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeFields:
    """The fields of a model shape as a config gives them."""

    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    kind: str
    windows: tuple[int, ...]
    max_tokens: int | None


def read_config(path: Path) -> Config:
    """Read a JSON object from a regular file of at most `MAX_CONFIG_BYTES`.

    Raises:
        InvalidUsage: no such file, not regular, too large, or no JSON object.
    """
    data = _read_bounded(path)
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"{path} is no JSON ({error}); give a model's config.json") from None
    if not isinstance(config, dict):
        raise InvalidUsage(
            f"{path} holds a JSON {type(config).__name__}; a model's config.json is an object"
        )
    return config


def shape_fields(config: Config, *, source: str) -> ShapeFields:
    """Pick the shape out of a config; ``source`` names it in errors.

    Raises:
        InvalidUsage: fields are missing or of a wrong type, or the cache is of an uncovered kind.
    """
    text = _text_model(config)
    _refuse_uncovered(text, source)
    required = {"layers": _LAYERS, "heads": _HEADS}
    missing = [" or ".join(names) for names in required.values() if _first(text, names) is None]
    is_mla = text.get("kv_lora_rank") is not None
    if is_mla:
        missing += [] if text.get("qk_rope_head_dim") is not None else ["qk_rope_head_dim"]
    elif text.get("head_dim") is None and _first(text, _HIDDEN) is None:
        missing.append("head_dim or hidden_size or n_embd")
    if missing:
        raise InvalidUsage(
            f"{source} lacks {'; '.join(missing)}; it has {_names(text)}; give the config.json of "
            "a language model, or add the fields"
        )
    num_layers = _number(text, _LAYERS, source)
    num_heads = _number(text, _HEADS, source)
    return ShapeFields(
        num_layers=num_layers,
        num_attention_heads=num_heads,
        num_kv_heads=1 if is_mla else _kv_heads(text, num_heads, source),
        head_dim=_latent_dim(text, source) if is_mla else _head_dim(text, num_heads, source),
        kind="mla" if is_mla else "gqa",
        windows=_windows(text, num_layers, source),
        max_tokens=_max_tokens(text),
    )


def _read_bounded(path: Path) -> bytes:
    try:
        # Non-blocking, because opening a FIFO would otherwise wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InvalidUsage(f"{path} is no regular file; give a model's config.json")
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise InvalidUsage(
            f"{path} cannot be read ({error.strerror}); give a readable config.json",
            error.errno or 0,
        ) from None
    if len(data) > MAX_CONFIG_BYTES:
        raise InvalidUsage(
            f"{path} is above the limit of {MAX_CONFIG_BYTES} bytes; give a model's config.json"
        )
    return data


def _text_model(config: Config) -> Config:
    """The language model's part: multimodal configs nest it."""
    for name in _NESTED:
        nested = config.get(name)
        if isinstance(nested, dict) and _first(nested, _LAYERS) is not None:
            return nested
    return config


def _refuse_uncovered(config: Config, source: str) -> None:
    for name in _UNCOVERED:
        if config.get(name):
            raise InvalidUsage(
                f"{source} has {name}: not every layer of this model keeps its own KV of every "
                "token, which this arithmetic does not cover; compute it by hand from the layers "
                "that do"
            )


def _first(config: Config, names: tuple[str, ...]) -> object:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _number(config: Config, names: tuple[str, ...], source: str) -> int:
    name = next(name for name in names if config.get(name) is not None)
    return _checks.dimension(f"{name} of {source}", config[name])


def _kv_heads(config: Config, num_heads: int, source: str) -> int:
    # Falcon and GPT-BigCode: one KV head, unless the newer decoder names its number.
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    if _first(config, _KV_HEADS) is None:
        return num_heads
    return _number(config, _KV_HEADS, source)


def _head_dim(config: Config, num_heads: int, source: str) -> int:
    if config.get("head_dim") is not None:
        return _number(config, ("head_dim",), source)
    hidden_size = _number(config, _HIDDEN, source)
    if hidden_size % num_heads:
        raise InvalidUsage(
            f"{source} has no head_dim, and {num_heads} heads do not divide the hidden size "
            f"{hidden_size}; add head_dim"
        )
    return hidden_size // num_heads


def _latent_dim(config: Config, source: str) -> int:
    rank = _number(config, ("kv_lora_rank",), source)
    return rank + _number(config, ("qk_rope_head_dim",), source)


def _max_tokens(config: Config) -> int | None:
    """None where the config does not say it: it decides no byte of the cache."""
    value = _first(config, _MAX_TOKENS)
    if not isinstance(value, int) or not 1 < value <= _checks.MAX_DIMENSION:
        return None
    return max(value, _stretched(config, value))


def _stretched(config: Config, max_tokens: int) -> int:
    """Tokens of a model whose positions are stretched beyond those that it says (YaRN, linear,
    dynamic); 0 where they are not, or what it says is counted with it (Llama 3, LongRoPE)."""
    rope = _first(config, ("rope_scaling", "rope_parameters"))
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) in _COUNTED_ROPES:
        return 0
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings", max_tokens)
    if not isinstance(factor, int | float) or not isinstance(original, int):
        return 0
    stretched = factor * original
    return int(stretched) if 1 < stretched <= _checks.MAX_DIMENSION else 0


def _windows(config: Config, num_layers: int, source: str) -> tuple[int, ...]:
    """The window of each layer, 0 = none; () where no layer slides."""
    _refuse_unknown_layers(config, num_layers, source)
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return ()
    window = _number(config, ("sliding_window",), source)
    return tuple(window if slides else 0 for slides in _slides(config, num_layers, source))


def _refuse_unknown_layers(config: Config, num_layers: int, source: str) -> None:
    types = config.get("layer_types")
    if types is None:
        return
    if not isinstance(types, list) or len(types) != num_layers:
        found = f"{len(types)} entries" if isinstance(types, list) else type(types).__name__
        raise InvalidUsage(f"layer_types of {source} is {found}; {num_layers} layers need a list")
    known = (*_FULL_LAYERS, "sliding_attention")
    unknown = next((kind for kind in types if kind not in known), None)
    if unknown is not None:
        raise InvalidUsage(
            f"layer_types of {source} has {str(unknown)[:80]!r}; only {', '.join(known)} keep KV "
            "in a way that this arithmetic covers"
        )


def _slides(config: Config, num_layers: int, source: str) -> list[bool]:
    """Which layers slide, in a model with a window."""
    types = config.get("layer_types")
    if isinstance(types, list):
        return [kind == "sliding_attention" for kind in types]
    if config.get("use_sliding_window") is True and config.get("max_window_layers") is not None:
        # Qwen2: the first max_window_layers layers are full.
        full = _checks.integer(
            f"max_window_layers of {source}",
            config["max_window_layers"],
            minimum=0,
            maximum=_checks.MAX_DIMENSION,
        )
        return [layer >= full for layer in range(num_layers)]
    pattern = _SLIDING_PATTERN.get(str(config.get("model_type")))
    if config.get("sliding_window_pattern") is not None:
        pattern = _number(config, ("sliding_window_pattern",), source)
    return [pattern is None or (layer + 1) % pattern != 0 for layer in range(num_layers)]


def _names(config: Config) -> str:
    names = sorted(config)
    shown = ", ".join(name[:80] for name in names[:20]) or "no fields"
    return shown + (f" and {len(names) - 20} more" if len(names) > 20 else "")
