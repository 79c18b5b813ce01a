"""What changed since an older report of the same node."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvxfer.diagnose.expected import DRIFT_FRACTION, HOST_DRIFT_FRACTION
from kvxfer.diagnose.facts import Facts
from kvxfer.diagnose.figures import HOST_KINDS, LOCAL_MEMCPY, Figure
from kvxfer.diagnose.inventory.sources import read_bytes
from kvxfer.diagnose.result import SCHEMA, Change, DiagnoseReport
from kvxfer.errors import InvalidUsage


def read_report(path: str) -> DiagnoseReport:
    """A report that ``--json`` wrote.

    Raises:
        InvalidUsage: it cannot be read, or is something else.
    """
    try:
        report = msgspec.json.decode(read_bytes(Path(path)), type=DiagnoseReport)
    except FileNotFoundError as error:
        raise InvalidUsage(f"cannot read {path!r}: {error.strerror}") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidUsage(f"{path!r} is no report of kvxfer diagnose --json: {error}") from error
    if report.schema != SCHEMA:
        raise InvalidUsage(f"{path!r} is of schema {report.schema!r}; this is {SCHEMA!r}")
    return report


def changes_since(old: DiagnoseReport, new: DiagnoseReport) -> list[Change]:
    """Facts, verdicts and rates that differ, those for the worse first."""
    found = [*_facts(old.facts, new.facts), *_verdicts(old, new), *_rates(old, new)]
    return sorted(found, key=lambda change: not change.worse)


def _facts(old: Facts, new: Facts) -> Iterator[Change]:
    before = {gpu.uuid or gpu.pci: gpu for gpu in old.gpus or ()}
    after = {gpu.uuid or gpu.pci: gpu for gpu in new.gpus or ()}
    for name in before.keys() - after.keys():
        yield Change(what=f"GPU {name}", before="here", after="gone", worse=True)
    for name in after.keys() - before.keys():
        yield Change(what=f"GPU {name}", before="not here", after="here", worse=False)
    for name in sorted(before.keys() & after.keys()):
        counts = len(before[name].active_links), len(after[name].active_links)
        if counts[0] != counts[1]:
            yield Change(
                what=f"NVLinks of GPU {after[name].index}",
                before=str(counts[0]),
                after=str(counts[1]),
                worse=counts[1] < counts[0],
            )
    for what, one, other in (
        ("driver", old.host.driver, new.host.driver),
        ("kernel", old.host.kernel, new.host.kernel),
    ):
        if one != other:
            yield Change(what=what, before=one or "none", after=other or "none", worse=False)


def _verdicts(old: DiagnoseReport, new: DiagnoseReport) -> Iterator[Change]:
    before = {result.check: result.verdict for result in old.checks}
    for result in new.checks:
        was = before.get(result.check)
        if was is not None and was is not result.verdict:
            yield Change(
                what=f"check {result.check}",
                before=was.value,
                after=result.verdict.value,
                worse=result.verdict.rank > max(was.rank, 1),
            )


def _rates(old: DiagnoseReport, new: DiagnoseReport) -> Iterator[Change]:
    for figure in new.figures.all:
        was = old.figures.get(*figure.key)
        before, after = (None if was is None else _rate(was)), _rate(figure)
        if before is None or after is None:
            continue
        on_cpus = figure.kind in (*HOST_KINDS, LOCAL_MEMCPY)
        if abs(after - before) > (HOST_DRIFT_FRACTION if on_cpus else DRIFT_FRACTION) * before:
            yield Change(
                what=figure.where,
                before=f"{before:.4g} GB/s",
                after=f"{after:.4g} GB/s",
                worse=after < before,
            )


def _rate(figure: Figure) -> float | None:
    """GB/s to compare: on CPUs the fastest round, since others use them now and then."""
    if figure.kind in (*HOST_KINDS, LOCAL_MEMCPY):
        return figure.best_gb_per_s or figure.gb_per_s
    return figure.gb_per_s
