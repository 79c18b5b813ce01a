"""What a statement imports."""

import subprocess
import sys
from pathlib import Path


def modules_after(statement: str, folder: Path, *, on_top_of: str = "sys") -> set[str]:
    """Modules that a fresh interpreter has after ``statement`` and had not before, which are left
    out where the module ``on_top_of`` has them."""
    code = (
        f"import sys, {on_top_of}; before = set(sys.modules); {statement}; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stdout.split())
