"""What one set-up answered: schema ``kvxfer.pd-reuse/1``, ``RUN/SETUP/reuse.json``.

It is written once all of a set-up is measured, so that a run that was cut off goes on with the
set-ups that have none. Fields are only ever added within version 1.
"""

from pathlib import Path
from typing import Final, Literal

import msgspec

from kvxfer.errors import InvalidUsage
from kvxfer.pd.experiments.kv_reuse.parts import Parts
from kvxfer.pd.result import MAX_RECORD_BYTES, PDSetup
from kvxfer.whole_file import read_bounded, write_whole

REUSE_FILE: Final = "reuse.json"


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt.

    Attributes:
        hit_tokens, index: which; see `Case`.
        text: the answer.
        cached_tokens: that the engine's own prefix cache had, as the engine counted.
        loaded_tokens: that came from the store, likewise.
        far_chunks, near_chunks: chunks of it that the store read from the far one, and that it had
            itself, as it counted; 0 where there is no far store.
        parts: None where there is no connector, or for the reason in ``no_parts``.
    """

    hit_tokens: int
    index: int
    ttft_s: float
    text: str
    cached_tokens: int = 0
    loaded_tokens: int = 0
    far_chunks: int = 0
    near_chunks: int = 0
    parts: Parts | None = None
    no_parts: str = ""


class ReuseRun(msgspec.Struct, frozen=True, kw_only=True):
    """All prompts of one set-up.

    Attributes:
        isl, osl: tokens in and out.
        token_bytes: KV of one token in all ranks; 0 where nobody said.
    """

    schema: Literal["kvxfer.pd-reuse/1"] = "kvxfer.pd-reuse/1"
    setup: PDSetup
    isl: int
    osl: int
    token_bytes: int = 0
    asked: list[Asked]


def save_run(folder: Path, run: ReuseRun) -> Path:
    """Write it into a set-up's folder, which is made where it is missing.

    Raises:
        InvalidUsage: it cannot be written.
    """
    return write_whole(folder / REUSE_FILE, msgspec.json.encode(run) + b"\n", make_folders=True)


def load_runs(folder: Path) -> list[ReuseRun]:
    """All that a run's folder holds, by name of the set-up.

    Raises:
        InvalidUsage: a record cannot be read.
    """
    return [load_run(path.parent) for path in sorted(folder.glob(f"*/{REUSE_FILE}"))]


def load_run(folder: Path) -> ReuseRun:
    """Of one set-up's folder.

    Raises:
        InvalidUsage: it cannot be read, or is not of the schema.
    """
    path = folder / REUSE_FILE
    try:
        return msgspec.json.decode(read_bounded(path, MAX_RECORD_BYTES), type=ReuseRun)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidUsage(f"{path} is not a record of kv-reuse: {error}") from error
