"""Runs as experiments take them: several joined into one, and what they ran on."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from kvxfer.errors import InvalidUsage
from kvxfer.pd.analysis.compare import contests, crossings
from kvxfer.pd.result import PDSetup
from kvxfer.pd.summary import RunSummary


def joined(runs: Sequence[tuple[Path, RunSummary]]) -> RunSummary:
    """Runs of several folders as one; a set-up's name that comes twice gets its folder's before it.

    Raises:
        InvalidUsage: two folders of one name hold set-ups of one name.
    """
    names = [one.setup.name for _, run in runs for one in run.setups]
    setups = []
    for path, run in runs:
        for one in run.setups:
            name = unique_name(one.setup.name, path, names)
            setups.append(replace(one, setup=msgspec.structs.replace(one.setup, name=name)))
    found = [one.setup.name for one in setups]
    for name in found:
        if found.count(name) > 1:
            raise InvalidUsage(f"two records hold a set-up {name}; rename one of the folders")
    run = RunSummary(setups=setups, objectives=runs[0][1].objectives)
    return replace(run, contests=contests(run), crossings=crossings(run))


def unique_name(name: str, run_folder: Path, names: Sequence[str]) -> str:
    """A set-up's name among all ``names`` of several runs."""
    return f"{run_folder.resolve().name}-{name}" if names.count(name) > 1 else name


def environment_of(run: RunSummary) -> dict[str, str]:
    """What a run's set-ups were, as `facts`."""
    return facts([one.setup for one in run.setups])


def facts(setups: Sequence[PDSetup]) -> dict[str, str]:
    """Versions, models and devices of set-ups, by name; what differs names its set-up."""
    found: dict[str, dict[str, list[str]]] = {}
    for one in setups:
        for name, value in _facts(one).items():
            if value:
                found.setdefault(name, {}).setdefault(value, []).append(one.name)
    return {
        name if len(values) == 1 else f"{name} of {', '.join(names)}": value
        for name, values in found.items()
        for value, names in values.items()
    }


def _facts(setup: PDSetup) -> dict[str, str]:
    return {
        **setup.environment,
        "model": setup.model,
        "devices": ", ".join(setup.devices),
        "measured at": setup.started_at,
    }


def findings_of(run: RunSummary, *, serious: bool) -> list[str]:
    """Findings of a run's analysis, those that spoil its figures or the others; each text once."""
    places: dict[str, list[str]] = {}
    for place, finding in run.findings():
        if finding.serious == serious:
            places.setdefault(finding.text, []).append(place)
    return [
        f"{at[0]}{f' and {len(at) - 1} more' if at[1:] else ''}: {text}"
        for text, at in places.items()
    ]
