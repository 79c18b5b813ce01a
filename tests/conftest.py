"""Puts the shared helpers on the path; in importlib mode pytest adds no folder by itself.

Tests go by the defaults, also where this machine has a tuning profile. They run in an empty folder:
programs that they start by ``python -m`` or ``-c`` import kvxfer as it is installed there, and not
the source tree, where the core is not built. Hypothesis minds no clock: machines are busy.
"""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
os.environ["KVXFER_TUNING"] = "off"
settings.register_profile(
    "kvxfer", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvxfer")


@pytest.fixture(scope="session", autouse=True)
def _outside_the_source_tree(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.chdir(tmp_path_factory.mktemp("outside"))
