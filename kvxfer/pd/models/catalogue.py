"""From what a person names as a model to what an engine can load."""

import json
from dataclasses import dataclass
from pathlib import Path

from kvxfer.errors import InvalidUsage
from kvxfer.pd.models.checkpoint import write_checkpoint
from kvxfer.pd.models.shapes import SHAPES, TINY
from kvxfer.pd.models.tokenizer import write_word_tokenizer

_DUMMY = "dummy:"
_SEED = 1


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What engines are told to load.

    Attributes:
        name: for people and records.
        source: a folder, or a name of the Hugging Face hub.
        engine_args: what engines must be told besides.
    """

    name: str
    source: str
    engine_args: tuple[str, ...] = ()

    @property
    def is_local(self) -> bool:
        """Whether nothing of it lies on the hub."""
        return Path(self.source).is_dir()


def find_model(text: str, folder: Path) -> ServedModel:
    """The model that ``text`` names; what is made for it is written to ``folder``.

    Args:
        text: a folder; ``tiny`` (a checkpoint of random weights, made here); ``dummy:SHAPE`` (the
            configuration alone, for speed: engines invent weights); else a name of the hub.
        folder: an existing folder, which must outlive the engines.

    Raises:
        InvalidUsage: a folder without config.json, or an unknown shape.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidUsage(f"model {text}: no config.json in this folder")
        return ServedModel(path.resolve().name, str(path.resolve()))
    if text == "tiny":
        made = _write(folder / text, "tiny")
        write_checkpoint(made, TINY, _SEED)
        # Engines halve the precision of float32 by default.
        return ServedModel(text, str(made), ("--dtype", "float32"))
    if text.startswith(_DUMMY):
        shape = text.removeprefix(_DUMMY)
        return ServedModel(text, str(_write(folder / shape, shape)), ("--load-format", "dummy"))
    if text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise InvalidUsage(
            f"model {text!r} is no folder here and no name of the hub (OWNER/NAME); use one of "
            f"them, tiny, or dummy:SHAPE with SHAPE one of {', '.join(SHAPES)}"
        )
    return ServedModel(text, text)


def _write(folder: Path, shape: str) -> Path:
    """The configuration and a tokenizer of a shape; returns the folder."""
    if shape not in SHAPES:
        raise InvalidUsage(f"shape {shape!r} is not known; use one of {', '.join(SHAPES)}")
    config = dict(SHAPES[shape])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    write_word_tokenizer(folder, config["vocab_size"], config["max_position_embeddings"])
    return folder
