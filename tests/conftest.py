"""Puts the shared helpers on the path; in importlib mode pytest adds no folder by itself."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
