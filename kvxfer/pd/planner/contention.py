"""What transfers of several requests at once reach together, from ``kvxfer send --json``."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, TypeAlias

import msgspec

from kvxfer.errors import InvalidUsage
from kvxfer.pd.result import MAX_RECORD_BYTES
from kvxfer.whole_file import read_bounded

_Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
_REMEDY = "measure 1,2,4,... of the same with `kvxfer send --concurrency N --json FILE`"


class SentRecord(msgspec.Struct, frozen=True):
    """The fields of a record that are used; see `kvxfer.worker.SendResult`."""

    concurrency: _Positive
    request_bytes: _Positive
    gb_per_s: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]
    actual_path: str
    checked: bool


def load_contention(paths: Sequence[Path]) -> tuple[tuple[int, float], ...]:
    """Points (requests at once, GB/s of all together by GB/s of one alone), ascending from 1.

    Several records of one concurrency count as their median. The requests should be so large that
    only their bytes count: what a hand-over takes besides would hide behind others and look faster.

    Raises:
        InvalidUsage: a file cannot be read or is no such record, its bytes were not checked, the
            records differ in more than their concurrency, or none is of one request at a time.
    """
    records = {path: _read(path) for path in paths}
    kinds = {(record.request_bytes, record.actual_path) for record in records.values()}
    if len(kinds) > 1:
        texts = ", ".join(f"{size} bytes by {way}" for size, way in sorted(kinds))
        raise InvalidUsage(f"the records are of different transfers ({texts}); {_REMEDY}")
    by_count: dict[int, list[float]] = {}
    for record in records.values():
        by_count.setdefault(record.concurrency, []).append(record.gb_per_s)
    if 1 not in by_count:
        raise InvalidUsage(f"no record of one request at a time; {_REMEDY}")
    alone = median(by_count[1])
    return tuple((count, median(by_count[count]) / alone) for count in sorted(by_count))


def _read(path: Path) -> SentRecord:
    try:
        record = msgspec.json.decode(read_bounded(path, MAX_RECORD_BYTES), type=SentRecord)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidUsage(f"{path} is not what `kvxfer send --json` wrote: {error}") from error
    if not record.checked:
        raise InvalidUsage(f"{path}: its bytes were not checked, so that its rate says nothing")
    return record
