"""What a statement imports."""

import json
import subprocess
import sys
from pathlib import Path


def modules_after(statement: str, folder: Path) -> set[str]:
    """Modules that a fresh interpreter has after ``statement`` and had not before."""
    code = (
        f"import sys, json; before = set(sys.modules); {statement}; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(json.loads(done.stdout))
