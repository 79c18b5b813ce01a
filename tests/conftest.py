"""Puts the shared helpers on the path; in importlib mode pytest adds no folder by itself.

Tests go by the defaults, also where this machine has a tuning profile.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
os.environ["KVXFER_TUNING"] = "off"
