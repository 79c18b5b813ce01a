"""Model shapes: the catalogue against public figures, and configs of many makers and of none."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from kvxfer.errors import InvalidUsage
from kvxfer.layout import CATALOGUE, KVKind, ModelShape, Order, TPLayout, load_model

GIB = 1 << 30
LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131_072,
}


def write(directory: Path, config: object) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    return path


def load(directory: Path, **changes: object) -> ModelShape:
    """Load LLAMA with changes; None takes a field away."""
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    return load_model(write(directory, config))


def refuse(directory: Path, message: str, **changes: object) -> None:
    with pytest.raises(InvalidUsage, match=message):
        load(directory, **changes)


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("llama-3.1-8b", 131072),
        ("llama-3.3-70b", 327680),
        ("llama-3.1-405b", 516096),
        ("qwen3-32b", 262144),
        ("qwen2.5-7b", 57344),
        ("gpt-oss-120b", 73728),
        ("deepseek-v3", 70272),
    ],
)
def test_catalogue_bytes_per_token(name: str, bytes_per_token: int) -> None:
    assert CATALOGUE[name].kv_layout().bytes_per_token == bytes_per_token
    assert CATALOGUE[name].kv_layout(dtype="fp8").bytes_per_token == bytes_per_token // 2


def test_the_catalogue_has_these_seven() -> None:
    assert len(CATALOGUE) == 7
    assert all(name == model.name == name.lower() for name, model in CATALOGUE.items())


@pytest.mark.parametrize(("name", "gib"), [("Llama-3.1-8B", 1.0), ("LLAMA-3.1-405B", 3.9375)])
def test_request_of_8192_tokens(name: str, gib: float) -> None:
    assert load_model(name).kv_layout().request_bytes(8192) / GIB == gib


def test_kv_layout_passes_its_arguments_on() -> None:
    layout = load_model("qwen3-32b").kv_layout(block_size=64, dtype="fp16", order="HND")
    assert (layout.block_size, layout.dtype, layout.order) == (64, "float16", Order.HND)
    assert layout.kv is KVKind.SPLIT
    assert load_model("deepseek-v3").kv_layout().kv is KVKind.MLA


# Windows.


def test_windowed_bytes_of_gpt_oss() -> None:
    model = load_model("gpt-oss-120b")
    layout = model.kv_layout()
    assert model.windowed_request_bytes(layout, 100) == layout.request_bytes(100)
    assert model.windowed_request_bytes(layout, 8192) == 18 * 2048 * (8192 + 128)
    rank = TPLayout(8, 3).rank_layout(layout)
    assert model.windowed_request_bytes(rank, 8192) == 18 * 256 * (8192 + 128)


def test_windowed_bytes_need_all_layers() -> None:
    model = load_model("gpt-oss-120b")
    half = TPLayout(pp_size=2).rank_layout(model.kv_layout())
    with pytest.raises(InvalidUsage, match="the layout has 18 layers and gpt-oss-120b 36"):
        model.windowed_request_bytes(half, 8192)


def test_without_windows_the_bytes_are_those_of_the_request() -> None:
    model = load_model("llama-3.1-8b")
    assert model.windowed_request_bytes(model.kv_layout(), 8192) == GIB


def test_gpt_oss_slides_in_every_other_layer_from_the_first() -> None:
    model = CATALOGUE["gpt-oss-120b"]
    assert model.kv_layout(windowed=True).windows == (128, 0) * 18
    assert model.kv_layout().windows == ()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 512, "sliding_window_pattern": 4}, {0, 1, 2, 4, 5, 6}),
        ({"sliding_window": 512, "model_type": "gemma2"}, {0, 2, 4, 6}),
        ({"sliding_window": 512, "model_type": "gemma3_text"}, {0, 1, 2, 3, 4, 6, 7}),
        (
            {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 6},
            {6, 7},
        ),
        (
            {
                "sliding_window": 512,
                "layer_types": ["full_attention", "sliding_attention"] * 4,
            },
            {1, 3, 5, 7},
        ),
    ],
)
def test_which_layers_of_eight_slide(
    tmp_path: Path, changes: dict[str, object], expected: set[int]
) -> None:
    model = load(tmp_path, num_hidden_layers=8, **changes)
    layout = model.kv_layout(windowed=True)
    assert layout.windows == tuple(512 if layer in expected else 0 for layer in range(8))


@pytest.mark.parametrize(
    ("changes", "window", "sliding"),
    [
        ({}, None, 0),
        ({"sliding_window": None}, None, 0),
        ({"sliding_window": 4096}, 4096, 32),
        ({"sliding_window": 4096, "use_sliding_window": False}, None, 0),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28}, 4096, 4),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 32}, None, 0),
        ({"sliding_window": 512, "sliding_window_pattern": 6}, 512, 27),
        ({"sliding_window": 512, "model_type": "gemma2"}, 512, 16),
        ({"layer_types": ["sliding_attention", "full_attention"] * 16}, None, 0),
        (
            {"sliding_window": 8, "layer_types": ["sliding_attention"] + ["full_attention"] * 31},
            8,
            1,
        ),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 32}, None, 0),
    ],
)
def test_windows_of_configs(
    tmp_path: Path, changes: dict[str, object], window: int | None, sliding: int
) -> None:
    model = load(tmp_path, **changes)
    assert (model.sliding_window, model.sliding_layers) == (window, sliding)


# Configs.


def test_a_directory_and_a_file_give_one_shape(tmp_path: Path) -> None:
    directory = tmp_path / "my-llama"
    directory.mkdir()
    path = write(directory, LLAMA)
    expected = dataclasses.replace(CATALOGUE["llama-3.1-8b"], name="my-llama")
    assert load_model(path) == load_model(str(directory)) == expected
    other = path.rename(tmp_path / "other.json")
    assert load_model(other).name == "other"


def test_a_symlink_is_followed(tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_text(json.dumps(LLAMA))
    (tmp_path / "config.json").symlink_to(blob)
    assert load_model(tmp_path).num_layers == 32


@pytest.mark.parametrize(
    ("changes", "heads", "dim"),
    [
        ({}, 8, 128),
        ({"num_key_value_heads": None}, 32, 128),
        ({"head_dim": 64}, 8, 64),
        ({"head_dim": 64, "hidden_size": None}, 8, 64),
        ({"multi_query": True}, 1, 128),
        ({"multi_query": True, "new_decoder_architecture": True}, 8, 128),
        ({"num_key_value_heads": None, "num_kv_heads": 4}, 4, 128),
    ],
)
def test_heads_of_configs(tmp_path: Path, changes: dict[str, object], heads: int, dim: int) -> None:
    model = load(tmp_path, **changes)
    assert (model.num_kv_heads, model.head_dim, model.kind) == (heads, dim, "gqa")


@pytest.mark.parametrize(
    ("value", "found"), [(40_960, 40_960), (None, None), (0, None), (-1, None), ("8k", None)]
)
def test_the_longest_request_of_configs(tmp_path: Path, value: object, found: int | None) -> None:
    assert load(tmp_path, max_position_embeddings=value).max_tokens == found
    assert CATALOGUE["llama-3.1-8b"].max_tokens == 131_072


@pytest.mark.parametrize(
    ("name", "rope", "found"),
    [
        ("rope_scaling", {"type": "yarn", "factor": 4.0}, 131_072),
        ("rope_scaling", {"rope_type": "linear", "factor": 2}, 65_536),
        (
            "rope_parameters",
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096},
            32_768,
        ),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, 32_768),
        ("rope_scaling", {"type": "longrope", "factor": 32}, 32_768),
        ("rope_scaling", {"type": "yarn", "factor": "many"}, 32_768),
        ("rope_scaling", None, 32_768),
    ],
)
def test_stretched_positions_are_more_tokens(
    tmp_path: Path, name: str, rope: object, found: int
) -> None:
    fields = {"max_position_embeddings": 32_768, name: rope}
    assert load(tmp_path, **fields).max_tokens == found


def test_null_is_the_same_as_absent(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, {**LLAMA, "head_dim": None, "kv_lora_rank": None}))
    assert (model.head_dim, model.kind) == (128, "gqa")


def test_mla_config(tmp_path: Path) -> None:
    fields = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 61}
    fields["max_position_embeddings"] = 163_840
    model = load(tmp_path, num_attention_heads=128, num_key_value_heads=128, **fields)
    assert dataclasses.replace(model, name="deepseek-v3") == CATALOGUE["deepseek-v3"]


def test_gpt2_names(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, {"n_layer": 12, "n_head": 12, "n_embd": 768}))
    assert (model.num_layers, model.num_kv_heads, model.head_dim) == (12, 12, 64)


@pytest.mark.parametrize("name", ["text_config", "llm_config"])
def test_multimodal_configs_nest_the_language_model(tmp_path: Path, name: str) -> None:
    vision = {"num_hidden_layers": 24, "num_attention_heads": 16, "hidden_size": 1024}
    config = {"vision_config": vision, name: LLAMA, "num_hidden_layers": 7}
    assert load_model(write(tmp_path, config)).num_layers == 32


# Refusals.


def test_missing_fields_are_named(tmp_path: Path) -> None:
    refuse(
        tmp_path,
        "lacks num_hidden_layers or n_layer; num_attention_heads or n_head; it has hidden_size,",
        num_hidden_layers=None,
        num_attention_heads=None,
    )
    refuse(tmp_path, "lacks head_dim or hidden_size or n_embd", hidden_size=None)
    refuse(tmp_path, "lacks qk_rope_head_dim", kv_lora_rank=512)
    path = write(tmp_path, {})
    with pytest.raises(InvalidUsage, match=f"{path} lacks .* it has no fields"):
        load_model(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": "32"}, r"num_hidden_layers of .*config\.json is '32' \(str\)"),
        ({"num_hidden_layers": True}, r"num_hidden_layers of .* is True \(bool\)"),
        ({"num_hidden_layers": 32.0}, r"is 32\.0 \(float\)"),
        ({"num_hidden_layers": -1}, "is -1; use an integer of 1"),
        ({"num_hidden_layers": 10**30}, "use an integer of 1 .. 16777216"),
        ({"num_key_value_heads": [8]}, r"num_key_value_heads of .* is \[8\]"),
        ({"hidden_size": 4097}, "32 heads do not divide the hidden size 4097; add head_dim"),
        ({"sliding_window": 0}, "sliding_window of .* is 0"),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": "x"}, "'x'"),
        ({"layer_types": ["full_attention"]}, "is 1 entries; 32 layers need a list"),
        ({"layer_types": 5}, "is int; 32 layers need a list"),
        ({"layer_types": ["linear_attention"] * 32}, "has 'linear_attention'; only"),
        ({"layer_types": [["full_attention"]] * 32}, "layer_types of"),
        ({"attn_layer_period": 8}, "has attn_layer_period: not every layer"),
        ({"num_kv_shared_layers": 10}, "has num_kv_shared_layers"),
    ],
)
def test_wrong_fields_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    refuse(tmp_path, message, **changes)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is no JSON"),
        (b"{", "is no JSON"),
        (b"\xff\xfe\x00", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b'{"num_hidden_layers": ' + b"9" * 5000 + b"}", "is no JSON"),
        (b"[1]", "holds a JSON list"),
        (b"null", "holds a JSON NoneType"),
        (b" " * ((4 << 20) + 1), "above the limit of 4194304 bytes"),
        (b'{"num_hidden_layers": NaN, "num_attention_heads": 1, "head_dim": 1}', "is nan"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(InvalidUsage, match=message):
        load_model(path)


def test_a_config_at_the_size_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(json.dumps(LLAMA).encode().ljust(4 << 20))
    assert load_model(path).num_layers == 32


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(InvalidUsage, match="is no regular file"):
        load_model(tmp_path)


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match=r"config\.json cannot be read \(No such file"):
        load_model(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(InvalidUsage, match=r"config\.json (cannot be read|is no regular file)"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["meta/llama-3.1-8", "", "x" * 5000, "a\0b"])
def test_unknown_models_get_near_names_and_the_catalogue(name: str, tmp_path: Path) -> None:
    if name == "":
        name = str(tmp_path / "nothing")
    with pytest.raises(InvalidUsage, match=r"known models: llama-3\.1-8b, .*deepseek-v3") as caught:
        load_model(name)
    assert ("did you mean llama-3.1-8b" in str(caught.value)) == name.startswith("meta")
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "mha"}, "kind is 'mha'"),
        ({"kind": "mla"}, "num_kv_heads is 8; MLA"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"windows": (128,) * 31}, "windows has 31 entries for 32 layers; give one a layer"),
        ({"windows": (0,) * 31 + (-1,)}, r"windows\[31\] is -1; use an integer of 0"),
        ({"windows": (1.5,) * 32}, r"windows\[0\] is 1\.5 \(float\)"),
    ],
)
def test_wrong_shapes_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        dataclasses.replace(CATALOGUE["llama-3.1-8b"], **changes)
