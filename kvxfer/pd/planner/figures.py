"""Engines whose costs come with kvxfer, by name, and engines of a file."""

from pathlib import Path
from typing import Final

from kvxfer.errors import InvalidUsage
from kvxfer.pd.planner.engine_model import EngineModel, load_engine

_FOLDER: Final = Path(__file__).parent / "figures"


def shipped() -> list[str]:
    """Names of the engines that come with kvxfer; ``figures/README.md`` says what each is of."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def find_engine(name_or_path: str) -> EngineModel:
    """An engine that comes with kvxfer by its name, or one of a file.

    A name wins over a file of the same spelling; write ``./name`` for the file.

    Raises:
        InvalidUsage: no such name or file, or the file is not an engine's figures.
    """
    if name_or_path in shipped():
        return load_engine(_FOLDER / f"{name_or_path}.json")
    path = Path(name_or_path)
    if not path.exists():
        raise InvalidUsage(
            f"{name_or_path!r} is neither a file nor an engine that comes with kvxfer; these are "
            f"{', '.join(shipped())}; measure yours with `kvxfer pd profile`"
        )
    return load_engine(path)
