"""What pip installs: names, versions, dependencies and the files of the wheel."""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest

import kvxfer
from kvxfer import _core
from kvxfer.sweep.agent_process import AgentProcess

ROOT = Path(__file__).resolve().parents[2]
LIGHT = {"numpy", "pyzmq", "msgspec", "rich", "nvidia-ml-py"}
EXTRAS = {"bench", "cupy", "demo", "dev", "nixl", "pd", "report", "test", "torch", "ucx"}
HEAVY = {"torch", "cupy", "nixl", "vllm", "lmcache", "numpy", "zmq", "pynvml", "rich"}


def requirements() -> tuple[set[str], dict[str, set[str]]]:
    """The base dependencies, and those of each extra."""
    base: set[str] = set()
    extras: dict[str, set[str]] = {}
    for line in metadata.requires("kvxfer") or []:
        name = re.split(r"[^\w.-]", line, maxsplit=1)[0].lower()
        extra = re.search(r"""extra\s*==\s*['"](\w+)""", line)
        (extras.setdefault(extra.group(1), set()) if extra else base).add(name)
    return base, extras


def wheel_problems(paths: Iterable[str]) -> list[str]:
    """What is missing from the files of a wheel, or has no place in it."""
    paths = set(paths)
    native = [path for path in paths if re.fullmatch(r"kvxfer/_core[^/]*\.so", path)]
    wanted = {"kvxfer/py.typed", "kvxfer/_core.pyi", "kvxfer/control/PROTOCOL.md"}
    problems = [f"missing {path}" for path in sorted(wanted - paths)]
    if len(native) != 1:
        problems.append(f"{len(native)} native modules")
    folders = ("kvxfer/", "kvxfer-", "../../../bin/kvxfer")
    problems += [f"strange {path}" for path in sorted(paths) if not path.startswith(folders)]
    sources = (".cpp", ".hpp", ".cu", ".cuh")
    return problems + [f"source {path}" for path in sorted(paths) if path.endswith(sources)]


def test_the_dependencies_are_light() -> None:
    base, _ = requirements()
    assert base == LIGHT


def test_the_extras_are_those_of_the_manual() -> None:
    assert set(metadata.metadata("kvxfer").get_all("Provides-Extra") or []) == EXTRAS
    _, extras = requirements()
    assert {"pytest", "pytest-benchmark", "pytest-timeout", "hypothesis"} <= extras["test"]
    assert {"ruff", "mypy", "clang-format", "pybind11-stubgen"} <= extras["dev"]


def test_one_version_everywhere() -> None:
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    versions = {
        "pyproject.toml": found.group(1),
        "metadata": metadata.version("kvxfer"),
        "kvxfer.__version__": kvxfer.__version__,
        "kvxfer._core": _core.build_info().version,
    }
    assert len(set(versions.values())) == 1, versions


def test_the_python_that_is_promised() -> None:
    described = metadata.metadata("kvxfer")
    assert described["Requires-Python"] == ">=3.10"
    assert described["License-Expression"] == "Apache-2.0"


@pytest.mark.parametrize(
    ("group", "value"),
    [("console_scripts", "kvxfer.cli.main:main"), ("pytest11", "kvxfer.pytest_plugin")],
)
def test_the_entry_points_lead_somewhere(group: str, value: str) -> None:
    found = [point for point in metadata.entry_points(group=group) if point.name == "kvxfer"]
    assert [point.value for point in found] == [value]
    assert found[0].load() is not None


def test_every_public_name_loads() -> None:
    for name in kvxfer.__all__:
        assert getattr(kvxfer, name) is not None
    assert set(kvxfer.__all__) <= set(dir(kvxfer))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = kvxfer.no_such_name


def test_the_import_is_light() -> None:
    code = "import json, sys, kvxfer; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=60
    )
    loaded = {name.partition(".")[0] for name in json.loads(result.stdout)}
    assert "kvxfer" in loaded
    assert not loaded & HEAVY


def test_a_folder_named_kvxfer_does_not_hide_the_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kvxfer").mkdir()
    (tmp_path / "kvxfer" / "__init__.py").write_text("raise ImportError('the wrong kvxfer')")
    monkeypatch.chdir(tmp_path)
    with AgentProcess() as agent:  # as the README's `kvxfer sweep` does in a clone
        agent.require_alive()


def test_the_native_module_is_the_installed_one() -> None:
    module = importlib.import_module("kvxfer._core")
    assert module.__file__ is not None
    assert module.__file__.endswith(".so")


def test_the_wheel_holds_the_package_alone() -> None:
    files = metadata.files("kvxfer") or []
    origin = metadata.distribution("kvxfer").read_text("direct_url.json") or "{}"
    if json.loads(origin).get("dir_info", {}).get("editable"):
        pytest.skip(reason="an editable install has no wheel's list of files")
    paths = [path.as_posix() for path in files if "__pycache__" not in path.parts]
    assert wheel_problems(paths) == []


def test_a_wrong_wheel_is_seen() -> None:
    good = {
        "kvxfer/__init__.py",
        "kvxfer/_core.cpython-310-x86_64-linux-gnu.so",
        "kvxfer/_core.pyi",
        "kvxfer/control/PROTOCOL.md",
        "kvxfer/py.typed",
        "kvxfer-0.1.0.dist-info/RECORD",
    }
    assert wheel_problems(good) == []
    for path in good - {"kvxfer/__init__.py", "kvxfer-0.1.0.dist-info/RECORD"}:
        assert len(wheel_problems(good - {path})) == 1
    for path in ("tests/unit/test_plan.py", "bench/bench_copy.py", "kvxfer/copy/paged_copy.cu"):
        assert len(wheel_problems(good | {path})) == 1
