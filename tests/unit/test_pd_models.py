"""Models made here: their files, read by other means than wrote them."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from kvxfer.errors import InvalidUsage
from kvxfer.layout.models import CATALOGUE, load_model
from kvxfer.pd.demo.smollm import _halves
from kvxfer.pd.models import find_model
from kvxfer.pd.models.checkpoint import write_checkpoint
from kvxfer.pd.models.shapes import TINY


def tensors_of(path: Path) -> dict[str, "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"]:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    found = {}
    end = 0
    for name, entry in header.items():
        begin, stop = entry["data_offsets"]
        assert begin == end
        end = stop
        raw = np.frombuffer(data, "<f4", count=(stop - begin) // 4, offset=8 + length + begin)
        found[name] = raw.reshape(entry["shape"])
    assert 8 + length + end == len(data)
    return found


def test_a_tiny_model_is_a_whole_folder(tmp_path: Path) -> None:
    model = find_model("tiny", tmp_path)
    folder = Path(model.source)
    assert model.name == "tiny"
    assert model.is_local
    assert json.loads((folder / "config.json").read_text()) == dict(TINY)
    tensors = tensors_of(folder / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].shape == (8192, 256)
    assert tensors["model.layers.3.self_attn.k_proj.weight"].shape == (128, 256)
    assert tensors["lm_head.weight"].shape == (8192, 256)
    assert len(tensors) == 4 * 9 + 3
    assert all(np.isfinite(tensor).all() for tensor in tensors.values())


def test_a_checkpoint_is_its_seed(tmp_path: Path) -> None:
    contents = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        write_checkpoint(tmp_path / name, {**TINY, "vocab_size": 16, "num_hidden_layers": 1}, seed)
        contents.append((tmp_path / name / "model.safetensors").read_bytes())
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-120b"])
def test_a_shape_has_the_cache_of_the_catalogue(name: str, tmp_path: Path) -> None:
    model = find_model(f"dummy:{name}", tmp_path)
    assert model.engine_args == ("--load-format", "dummy")
    found, known = load_model(model.source), CATALOGUE[name]
    for field in ("num_layers", "num_attention_heads", "num_kv_heads", "head_dim", "windows"):
        assert getattr(found, field) == getattr(known, field), field


def test_a_random_text_is_as_long_as_asked_for(tmp_path: Path) -> None:
    tokenizer = json.loads(
        (Path(find_model("dummy:llama-3.1-8b", tmp_path).source) / "tokenizer.json").read_text()
    )
    vocab = tokenizer["model"]["vocab"]
    words = {token: word for word, token in vocab.items()}
    assert sorted(words) == list(range(128256))
    ids = np.random.default_rng(1).integers(0, len(words), 1000).tolist()
    text = " ".join(words[token] for token in ids)  # what its decoder does
    assert [vocab[word] for word in text.split()] == ids


def test_folders_and_names_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(InvalidUsage, match=r"no config\.json"):
        find_model(str(tmp_path / "mine"), tmp_path)
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert find_model(str(tmp_path / "mine"), tmp_path).source == str(tmp_path / "mine")
    hub = find_model("owner/name", tmp_path)
    assert (hub.source, hub.is_local) == ("owner/name", False)


@pytest.mark.parametrize("text", ["", "nowhere", "./a", "/a/b", "a/b/c", "dummy:", "dummy:../x"])
def test_what_is_no_model_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage):
        find_model(text, tmp_path)


def test_rotary_rows_come_back_in_halves() -> None:
    rows = np.arange(2 * 8, dtype=np.float32).reshape(16, 1)  # two heads of eight
    paired = np.concatenate([head[[0, 4, 1, 5, 2, 6, 3, 7]] for head in (rows[:8], rows[8:])])
    assert (_halves(paired, 2) == rows).all()
