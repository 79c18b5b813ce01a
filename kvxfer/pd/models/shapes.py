"""The ``config.json`` of models whose shape is enough: for speed, weights may be dummies.

Values: the public configurations of meta-llama/Llama-3.1-8B and openai/gpt-oss-120b.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

Config = Mapping[str, Any]

_LLAMA: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": None,
}

TINY: Final[Config] = MappingProxyType(
    {
        **_LLAMA,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 8192,
        "max_position_embeddings": 16384,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
    }
)

_LLAMA_8B: Final[Config] = MappingProxyType(
    {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "torch_dtype": "bfloat16",
    }
)

_GPT_OSS_120B: Final[Config] = MappingProxyType(
    {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "swiglu_limit": 7.0,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "vocab_size": 201088,
        "pad_token_id": 199999,
        "eos_token_id": 200002,
        "max_position_embeddings": 131072,
        "initial_context_length": 4096,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
        "torch_dtype": "bfloat16",
    }
)

SHAPES: Final[Mapping[str, Config]] = MappingProxyType(
    {"tiny": TINY, "llama-3.1-8b": _LLAMA_8B, "gpt-oss-120b": _GPT_OSS_120B}
)
