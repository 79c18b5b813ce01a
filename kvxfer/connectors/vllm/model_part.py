"""What vLLM's configuration says of a worker's part of the model. Attributes alone are used."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvxfer.connectors.vllm.cache_map import ModelPart
from kvxfer.connectors.vllm.pages import PLAIN
from kvxfer.errors import InvalidUsage
from kvxfer.layout import TPLayout

# Layers whose cache holds, for each token that they still need, its K and V or its latent.
_SPECS = (
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "UniformTypeKVCacheSpecs",
)


def block_sizes(kv_cache_config: Any) -> list[int]:
    """Tokens in a block of the scheduler, of each group of layers.

    Raises:
        InvalidUsage: a kind of layer that keeps something else than KV, or blocks that differ.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    kinds = {type(spec).__name__ for spec in specs}
    unknown = sorted(kinds.difference(_SPECS))
    if unknown:
        raise InvalidUsage(
            f"this model has layers of {', '.join(unknown)}; kvxfer hands over {', '.join(_SPECS)}"
        )
    sizes = [spec.block_size for spec in specs]
    if len(set(sizes)) > 1:
        raise InvalidUsage(
            f"groups of layers have blocks of {sizes} tokens; kvxfer hands over models where all "
            "are equal"
        )
    return sizes


def model_part(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    block_tokens: Sequence[int],
) -> ModelPart:
    """A worker's part, of the model of ``vllm_config``."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    layers = vllm_config.compilation_config.static_forward_context
    groups, windows = {}, {}
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            groups[name] = number
            windows[name] = _window(group.kv_cache_spec, name)
    return ModelPart(
        num_layers=model.get_total_num_hidden_layers() if pp_size > 1 else len(kv_caches),
        num_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        block_tokens=block_tokens[0],
        is_mla=model.use_mla,
        rank=TPLayout(
            tp_size,
            parallel.rank % tp_size,
            pp_size=pp_size,
            pp_rank=parallel.rank // tp_size % pp_size,
        ),
        page_format=_page_format(layers, kv_caches),
        groups=groups,
        windows=windows,
    )


def _window(spec: Any, name: str) -> int:
    """Tokens that a layer looks back, in a group whose blocks go as the window leaves them.

    A sliding layer among full ones keeps its blocks, and the prefix cache takes them for whole: all
    of its tokens are handed over.
    """
    own = getattr(spec, "kv_cache_specs", {}).get(name, spec)
    return int(own.sliding_window) if type(own).__name__.startswith("SlidingWindow") else 0


def _page_format(layers: Mapping[str, Any], kv_caches: Mapping[str, Any]) -> str:
    """GPU kernels keep tokens apart; those of a CPU as its instruction set likes it."""
    name, cache = next(iter(kv_caches.items()))
    if cache.device.type != "cpu":
        return PLAIN
    return f"cpu-{getattr(layers.get(name), 'isa', 'any')}"
