"""Names of models: the same in other spellings, known to differ, or neither."""

import json
from pathlib import Path

import pytest

from kvxfer.layout.models import load_model
from kvxfer.pd.models.shapes import TINY
from kvxfer.pd.planner.same_model import Model, relation


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ("llama-3.1-8b", "llama-3.1-8b", "same"),
        ("dummy:llama-3.1-8b", "Llama-3.1-8B", "same"),
        ("openai/gpt-oss-120b", "gpt-oss-120b", "same"),
        ("/models/mine/", "somebody/mine", "same"),
        ("llama-3.1-8b", "gpt-oss-120b", "other"),
        ("tiny", "dummy:llama-3.1-8b", "other"),
        ("deepseek-v3", "tiny", "other"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b", "unknown"),
        ("known", "tiny", "unknown"),
    ],
)
def test_names_are_related_by_what_is_known(one: str, other: str, wanted: str) -> None:
    assert relation(Model.named(one), Model.named(other)) == wanted
    assert relation(Model.named(other), Model.named(one)) == wanted


def test_a_config_is_compared_by_its_shape(tmp_path: Path) -> None:
    config = tmp_path / "snapshot" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(dict(TINY)))
    shape = load_model(config)
    assert relation(Model.named("tiny"), Model.of(shape)) == "unknown"  # equal, by another name
    assert relation(Model.named("llama-3.1-8b"), Model.of(shape)) == "other"
    assert str(Model.of(shape)) == "snapshot (4 layers, 2 KV heads of 64)"
    assert str(Model.named("deepseek-v3")) == "deepseek-v3 (61 layers, MLA of 576)"
    assert str(Model.named("mine")) == "mine"
