"""The architecture of the native room as a test, and the freshness of its stub.

As in test_architecture.py every rule is a function from sources (path -> text) to complaints, so
that each can be shown to fail on a planted violation. ``csrc/DESIGN.md`` gives the reasons.
"""

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
Sources = Mapping[str, str]
Rule = Callable[[Sources], list[str]]

# Native rooms: what each may include, besides itself.
CPP_ARROWS: dict[str, set[str]] = {
    "core": set(),
    "memory": {"core"},
    "transport": {"core"},
    "copy": {"core", "memory", "transport"},
    "ucx": {"core", "memory", "transport", "copy"},
    "bindings": {"core", "memory", "transport", "copy", "ucx"},
}
# The build without CUDA has one stand-in for the CUDA halves of both rooms.
CPP_EXCEPTIONS = {
    ("csrc/memory/no_cuda.cpp", f"copy/{header}.hpp") for header in ("device_copier", "stream_mark")
}
# Our own headers that include CUDA's: as closed to the host's code as those.
CUDA_HEADERS = {"core/cuda_check.hpp", "core/driver.hpp"}
# Likewise for UCX, whose headers stay in its room.
UCX_HEADERS = {
    f"ucx/{name}.hpp" for name in ("channel", "connection", "library", "pieces", "worker")
}
CXX20_HEADERS = {"bit", "concepts", "format", "ranges", "source_location", "span", "stop_token"}
CUDA_USERS = {f"csrc/{header}" for header in CUDA_HEADERS} | {
    "csrc/core/driver.cpp",
    "csrc/memory/device.cpp",
    "csrc/memory/device_context.cpp",
    "csrc/memory/ipc.cpp",
    "csrc/copy/device_copier.cpp",
    "csrc/copy/stream_mark.cpp",
}


def read_tree() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in sorted((ROOT / "csrc").rglob("*"))
        if path.suffix in {".cpp", ".hpp", ".cu", ".cuh"}
    }


def room_of(path: str) -> str:
    return PurePosixPath(path).parts[1]


def includes(sources: Sources) -> Iterator[tuple[str, str, bool]]:
    """(path, header, whether it is one of ours)."""
    pattern = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)', re.MULTILINE)
    for path, source in sources.items():
        if path.startswith("csrc/"):
            for quote, header in pattern.findall(source):
                room, slash, _ = header.partition("/")  # <memory> is the standard library's
                yield path, header, quote == '"' or (bool(slash) and room in CPP_ARROWS)


def code_matches(sources: Sources, pattern: str, why: str) -> list[str]:
    comment = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
    return [
        f"{path}: {match.group()} {why}"
        for path, source in sources.items()
        if path.startswith("csrc/")
        for match in re.finditer(pattern, comment.sub("", source))
    ]


def cpp_arrows(sources: Sources) -> list[str]:
    complaints = []
    for path, header, ours in includes(sources):
        room, target = room_of(path), header.partition("/")[0]
        allowed = target in {room, *CPP_ARROWS.get(room, set())} and target in CPP_ARROWS
        if ours and not allowed and (path, header) not in CPP_EXCEPTIONS:
            complaints.append(f"{path}: includes {header}: not an arrow of csrc/{room}")
    return complaints


def pybind_home(sources: Sources) -> list[str]:
    return [
        f"{path}: includes {header}: Python belongs in csrc/bindings"
        for path, header, _ in includes(sources)
        if re.match(r"pybind11/|Python\.h$|numpy/", header) and room_of(path) != "bindings"
    ]


def cuda_headers(sources: Sources) -> list[str]:
    return [
        f"{path}: includes {header}: the build without CUDA cannot compile it"
        for path, header, _ in includes(sources)
        if re.match(r"cuda|cooperative_groups|cub/|thrust/|nvml", header)
        or header in CUDA_HEADERS
        or header.endswith(".cuh")
        if path not in CUDA_USERS and not path.endswith((".cu", ".cuh"))
    ]


def ucx_headers(sources: Sources) -> list[str]:
    return [
        f"{path}: includes {header}: the build without UCX cannot compile it"
        for path, header, _ in includes(sources)
        if re.match(r"uc[pst]/", header) or header in UCX_HEADERS
        if room_of(path) != "ucx" or path == "csrc/ucx/no_ucx.cpp"
    ]


def device_standard(sources: Sources) -> list[str]:
    """Device code is C++17: older CMake knows no flag for more. So are headers that it includes."""
    found: dict[str, list[tuple[str, bool]]] = {}
    for path, header, ours in includes(sources):
        found.setdefault(path, []).append((header, ours))
    reached, waiting = set(), [path for path in sources if path.endswith(".cu")]
    while waiting:
        path = waiting.pop()
        if path not in reached:
            reached.add(path)
            waiting += [f"csrc/{header}" for header, ours in found.get(path, []) if ours]
    return [
        f"{path}: includes {header}: device code is C++17"
        for path in sorted(reached)
        for header, ours in found.get(path, [])
        if not ours and header in CXX20_HEADERS
    ]


def native_environment(sources: Sources) -> list[str]:
    return code_matches(sources, r"\b(secure_)?getenv\b|\benviron\b", "(settings are passed down)")


def native_evaluation(sources: Sources) -> list[str]:
    pattern = r"\bpy(bind11)?::(eval|exec|eval_file|pickle)\b|\bmarshal\b|\bPyRun_"
    return code_matches(sources, pattern, "runs code from data")


RULES: tuple[Rule, ...] = (
    cpp_arrows,
    pybind_home,
    cuda_headers,
    ucx_headers,
    device_standard,
    native_environment,
    native_evaluation,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Rule) -> None:
    assert rule(read_tree()) == []


def test_the_tree_was_read() -> None:
    found = {(path, header) for path, header, _ in includes(read_tree())}
    assert ("csrc/copy/bulk_copy.cu", "cuda_runtime.h") in found
    assert found >= CPP_EXCEPTIONS, "an exception that nothing needs"


PLANTED: list[tuple[Rule, str, str]] = [
    (native_evaluation, "csrc/bindings/a.cpp", 'auto x = py::eval("1");'),
    (cpp_arrows, "csrc/core/a.cpp", '#include "memory/device.hpp"'),
    (cpp_arrows, "csrc/memory/a.cpp", '#include "copy/copy_plan.hpp"'),
    (cpp_arrows, "csrc/memory/a.cpp", '#include "transport/completion_board.hpp"'),
    (cpp_arrows, "csrc/transport/a.cpp", "#include <memory/ipc.hpp>"),
    (cpp_arrows, "csrc/copy/a.cu", '  #  include "bindings/tables.hpp"'),
    (cpp_arrows, "csrc/core/a.cpp", '#include "error.hpp"'),
    (cpp_arrows, "csrc/attic/a.cpp", '#include "core/error.hpp"'),
    (pybind_home, "csrc/copy/a.cpp", "#include <pybind11/numpy.h>"),
    (pybind_home, "csrc/core/a.cpp", "#include <Python.h>"),
    (cuda_headers, "csrc/copy/device_copier.hpp", "#include <cuda_runtime.h>"),
    (cuda_headers, "csrc/transport/a.cpp", "#include <cuda.h>"),
    (cuda_headers, "csrc/bindings/a.cpp", '#include "core/cuda_check.hpp"'),
    (cuda_headers, "csrc/bindings/a.cpp", '#include "copy/paged_copy.cuh"'),
    (cpp_arrows, "csrc/transport/a.cpp", '#include "ucx/wire.hpp"'),
    (ucx_headers, "csrc/bindings/a.cpp", '#include "ucx/worker.hpp"'),
    (ucx_headers, "csrc/ucx/no_ucx.cpp", "#include <ucp/api/ucp.h>"),
    (device_standard, "csrc/copy/a.cu", "#include <span>"),
    (native_environment, "csrc/memory/a.cpp", 'auto home = std::getenv("HOME");'),
]


@pytest.mark.parametrize(("rule", "path", "source"), PLANTED)
def test_the_rule_sees_a_planted_violation(rule: Rule, path: str, source: str) -> None:
    complaints = rule({path: source})
    assert len(complaints) == 1
    assert path in complaints[0]


def test_device_code_is_followed_into_its_headers() -> None:
    sources = {"csrc/copy/a.cu": '#include "copy/a.hpp"', "csrc/copy/a.hpp": "#include <span>"}
    assert device_standard(sources) == ["csrc/copy/a.hpp: includes span: device code is C++17"]
    assert device_standard({"csrc/copy/a.hpp": "#include <span>"}) == []


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for rule, *_ in PLANTED} == set(RULES)


INNOCENT: Sources = {
    "csrc/copy/a.hpp": '// no getenv, no py::eval\n#include "core/check.hpp"\n#include <memory>\n',
    "csrc/copy/a.cu": '#include <cuda_runtime.h>\n#include "copy/paged_copy.cuh"\n',
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_lets_the_innocent_pass(rule: Rule) -> None:
    assert rule(INNOCENT) == []


# The committed stub of the native module.

STUBGEN = ["kvxfer._core", "--enum-class-locations", ".+:kvxfer._core"]


def normalised(stub: str) -> list[str]:
    """Lines of a stub without what changes with the Python version that wrote it."""
    module = ast.parse(stub.replace("typing_extensions.CapsuleType", "types.CapsuleType"))
    module.body = [node for node in module.body if not isinstance(node, ast.Import)]
    for owner in [node for node in module.body if isinstance(node, ast.ClassDef)]:
        buffers = ("__buffer__", "__release_buffer__")
        owner.body = [node for node in owner.body if getattr(node, "name", "") not in buffers]
    return ast.unparse(module).splitlines()


def test_the_stub_is_fresh(tmp_path: Path) -> None:
    needed = ["pybind11_stubgen", *(["typing_extensions"] if sys.version_info < (3, 13) else [])]
    for name in needed:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed; pip install '.[dev]' brings it")
    subprocess.run(
        [sys.executable, "-m", "pybind11_stubgen", *STUBGEN, "--exit-code", "-o", str(tmp_path)],
        check=True,
        cwd=tmp_path,  # not the source tree, whose kvxfer/ has no native module
        timeout=60,
    )
    generated = (tmp_path / "kvxfer" / "_core.pyi").read_text()
    committed = (ROOT / "kvxfer" / "_core.pyi").read_text()
    remedy = f"write it anew: pybind11-stubgen {' '.join(STUBGEN)} -o ."
    assert normalised(committed) == normalised(generated), remedy


def test_a_stale_stub_is_seen() -> None:
    old = '"""Core."""\nimport types\ndef copy(pool: Pool) -> None:\n    ...\n'
    new = '"""Core."""\nimport types\n\ndef copy(pool: Pool, fast: bool) -> None: ...\n'
    assert normalised(old) != normalised(new)
    assert normalised(old) == normalised(old.replace("import types\n", "import typing\n\n"))
