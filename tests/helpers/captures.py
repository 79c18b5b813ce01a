"""Captured nodes of ``tests/data/diagnose``, put together: most differ from another in a file."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "data" / "diagnose"
CASES = sorted(path.name for path in FOLDER.iterdir())
_EXPECTED = "expected.json"


def expected_of(name: str) -> dict[str, Any]:
    """What is to be found: verdicts of the case, above those of the case that it is based on."""
    found: dict[str, Any] = json.loads((FOLDER / name / _EXPECTED).read_text())
    if base := found.get("based_on"):
        found["verdicts"] = expected_of(base)["verdicts"] | found["verdicts"]
    return found


def write_capture(name: str, folder: Path) -> Path:
    """All files of a case in ``folder``, which is returned."""
    expected = json.loads((FOLDER / name / _EXPECTED).read_text())
    if base := expected.get("based_on"):
        write_capture(base, folder)
        for left_out in expected["without"]:
            (folder / left_out).unlink()
    shutil.copytree(
        FOLDER / name, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(_EXPECTED)
    )
    return folder


def edit_capture(folder: Path, name: str, old: str, new: str, count: int = 1) -> None:
    """Put ``new`` for a pattern in a file of a capture: the first of it, or ``count``; 0 = all."""
    text, found = re.subn(old, new, (folder / name).read_text(), count=count)
    assert found, f"{name} has no {old!r}"
    (folder / name).write_text(text)
