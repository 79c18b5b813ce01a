"""A seeded Llama checkpoint as safetensors: equal on every machine, its output a function of all
of its context.

Dummy weights of vLLM will not do for that: their output hardly depends on the context, and another
tensor-parallel size is another model.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvxfer.pd.models.safetensors import write_safetensors
from kvxfer.pd.models.shapes import Config

_Weights: TypeAlias = "npt.NDArray[np.float32]"

# Scores of attention get this standard deviation: each token looks at a few others, not at all
# alike, and so the order of the context counts.
_SCORE_STD = 3.0
# The embedding is small beside what attention adds: the next token follows from the context.
_EMBEDDING_STD = 0.2


def write_checkpoint(folder: Path, config: Config, seed: int) -> None:
    """Write ``model.safetensors``, float32.

    Args:
        folder: where; it exists.
        config: a Llama without biases, its head untied.
        seed: of all weights.
    """
    tensors = dict(_llama_tensors(config, np.random.default_rng(seed)))
    write_safetensors(folder / "model.safetensors", tensors)


def _llama_tensors(config: Config, rng: np.random.Generator) -> Iterator[tuple[str, _Weights]]:
    """Names as Hugging Face's Llama has them; shapes (outputs, inputs)."""
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    kv_heads = config["num_key_value_heads"] * config["head_dim"]

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> _Weights:
        # Unit variance in, gain squared out.
        weights: _Weights = rng.standard_normal((outputs, inputs), dtype=np.float32)
        weights *= gain / inputs**0.5
        return weights

    embedding = rng.standard_normal((config["vocab_size"], hidden), dtype=np.float32)
    yield "model.embed_tokens.weight", embedding * np.float32(_EMBEDDING_STD)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        # q and k each get the root: a score is their product.
        yield f"{at}.self_attn.q_proj.weight", matrix(heads, hidden, _SCORE_STD**0.5)
        yield f"{at}.self_attn.k_proj.weight", matrix(kv_heads, hidden, _SCORE_STD**0.5)
        yield f"{at}.self_attn.v_proj.weight", matrix(kv_heads, hidden)
        yield f"{at}.self_attn.o_proj.weight", matrix(hidden, heads)
        yield f"{at}.mlp.gate_proj.weight", matrix(middle, hidden)
        yield f"{at}.mlp.up_proj.weight", matrix(middle, hidden)
        yield f"{at}.mlp.down_proj.weight", matrix(hidden, middle)
        yield f"{at}.input_layernorm.weight", np.ones(hidden, np.float32)
        yield f"{at}.post_attention_layernorm.weight", np.ones(hidden, np.float32)
    yield "model.norm.weight", np.ones(hidden, np.float32)
    yield "lm_head.weight", matrix(config["vocab_size"], hidden)
