"""All tests here kill, stop or cut off real processes."""

import sys
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent
sys.path.insert(0, str(_FOLDER))  # for soak.py


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _FOLDER in item.path.parents:
            item.add_marker(pytest.mark.faults)
