"""``import kvxfer`` brings in nothing heavy; a name brings in its own room when it is used."""

from pathlib import Path

import pytest
from imports import modules_after

HEAVY = {"torch", "cupy", "zmq", "rich", "pynvml", "msgspec", "kvxfer._core", "vllm", "nixl"}


@pytest.mark.parametrize(
    "statement",
    [
        "import kvxfer",
        "import kvxfer; kvxfer.__version__; dir(kvxfer)",
        "import kvxfer.errors, kvxfer.units",
        "from kvxfer.errors import InvalidUsage",
    ],
)
def test_importing_the_package_is_light(statement: str, tmp_path: Path) -> None:
    found = modules_after(statement, tmp_path)
    assert "kvxfer" in found
    assert not HEAVY & found


def test_the_layout_room_needs_numpy_alone(tmp_path: Path) -> None:
    found = modules_after("from kvxfer import KVLayout, TPLayout, plan", tmp_path)
    assert "numpy" in found
    assert not HEAVY & found


def test_memory_needs_the_core_but_no_control_plane(tmp_path: Path) -> None:
    found = modules_after("from kvxfer import register, shared_empty", tmp_path)
    assert "kvxfer._core" in found
    assert not {"torch", "cupy", "zmq", "rich"} & found


def test_the_check_sees_what_is_imported(tmp_path: Path) -> None:
    found = modules_after("import kvxfer; kvxfer.Endpoint", tmp_path)
    assert {"zmq", "msgspec", "kvxfer._core"} <= found
    assert not {"torch", "cupy", "rich"} & found


def test_an_unknown_name_is_an_attribute_error(tmp_path: Path) -> None:
    import kvxfer

    with pytest.raises(AttributeError, match="module 'kvxfer' has no attribute 'nothing'"):
        kvxfer.nothing  # noqa: B018 - the access is the test


def test_every_public_name_is_found_and_listed() -> None:
    import kvxfer

    assert set(kvxfer.__all__) <= set(dir(kvxfer))
    for name in kvxfer.__all__:
        assert getattr(kvxfer, name) is not None
