"""Tuning profiles of this machine, and others."""

from pathlib import Path
from typing import Any

from kvxfer.transport.network_libraries import library_versions
from kvxfer.transport.tuned import host_fingerprint
from kvxfer.tuning import SCHEMA, Profile, Section, write_profile


def profile_of(*sections: Section, **fields: Any) -> Profile:
    """A profile of this machine, libraries included, unless ``fields`` say otherwise."""
    own = {"fingerprint": host_fingerprint(library_versions())}
    return Profile(
        schema=SCHEMA, created="2026-11-30T00:00:00Z", sections=sections, **{**own, **fields}
    )


def written(folder: Path, *sections: Section, **fields: Any) -> Path:
    """The same in a file."""
    path = folder / "tuning.json"
    write_profile(path, profile_of(*sections, **fields))
    return path
