"""Tests on two GPUs, between two processes or in one."""

from collections.abc import Iterator
from pathlib import Path

import gpu_needs
import pytest
from gpu_pairs import DeviceChild


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_needs.mark(items, Path(__file__).parent, "multi_gpu", 2)


@pytest.fixture(scope="session")
def children() -> Iterator[list[DeviceChild]]:
    """The far sides so far; all but the last have died."""
    started: list[DeviceChild] = []
    yield started
    for child in started:
        child.close()


@pytest.fixture
def child(children: list[DeviceChild]) -> DeviceChild:
    """The far side, which all tests share, since a process takes long to meet a GPU."""
    if not children or not children[-1].alive:
        children.append(DeviceChild())
    return children[-1]
