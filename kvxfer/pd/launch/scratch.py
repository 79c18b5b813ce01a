"""Where a command's programs stand: logs, and the models that are made for them."""

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvxfer.pd.result import make_folder

_PREFIX: Final = "kvxfer-pd-"
_MODELS: Final = "models"
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Scratch:
    """Folders of one command.

    Attributes:
        logs: gets a folder for each set-up that is started, and what clients say.
        models: gets the models that are made here.
        has_failed: whether logs are wanted; set it where a failure is told of but not raised.
    """

    logs: Path
    models: Path
    has_failed: bool = False


@contextmanager
def scratch_folder(kept: Path | None) -> Iterator[Scratch]:
    """Folders for a block: both are ``kept``, or new ones, which go with the block.

    Where it fails, logs stay, without models, and a warning says where.

    Raises:
        InvalidUsage: ``kept`` cannot be made or written.
    """
    if kept is not None:
        make_folder(kept)
        yield Scratch(kept.resolve(), kept.resolve())
        return
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    scratch = Scratch(folder, folder / _MODELS)
    scratch.models.mkdir()
    try:
        yield scratch
    except Exception:
        scratch.has_failed = True
        raise
    finally:
        _tidy(scratch)


def _tidy(scratch: Scratch) -> None:
    shutil.rmtree(scratch.models, ignore_errors=True)
    if scratch.has_failed and any(path.is_file() for path in scratch.logs.rglob("*")):
        _log.warning("logs are kept in %s", scratch.logs)
    else:
        shutil.rmtree(scratch.logs, ignore_errors=True)
