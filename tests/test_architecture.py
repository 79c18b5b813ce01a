"""The architecture as a test: who may import whom, and where each outside name has its home.

The native room has its own file, test_native_architecture.py.
Every rule is a function from sources (path -> text) to a list of complaints, so that each can be
shown to fail on a planted violation. A new room, arrow or third-party name is added in the tables
here, in the commit that needs it.
"""

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
Sources = Mapping[str, str]
Rule = Callable[[Sources], list[str]]

MAX_LINES = 400
SUFFIXES = {".py", ".cpp", ".hpp", ".cu", ".cuh"}

# Python rooms: what each may import of kvxfer, besides itself. An entry "room.module" allows that
# module alone. `_core` is the native module; `facade` is the package's own lazy names.
_BASE = {"closing", "descriptors", "errors", "ip", "units", "env", "whole_file"}
_TRANSPORT = _BASE | {"layout", "memory", "tuning"}
_SESSION = _TRANSPORT | {"transport", "control"}
_ENGINES = _SESSION | {"session", "connectors"}
_TOOLS = {"sweep", "worker", "diagnose", "pd", "report", "cli"}
ARROWS: dict[str, set[str]] = {
    "__init__": {"layout", "memory", "transport", "session"},
    "__main__": {"cli"},
    "closing": set(),
    "descriptors": set(),
    "whole_file": {"errors"},
    "errors": set(),
    "ip": set(),
    "units": {"errors"},
    "env": {"errors", "units"},
    "layout": _BASE,
    "control": _BASE | {"layout"},
    "memory": _BASE | {"layout", "_core"},
    "tuning": _BASE,
    "transport": _TRANSPORT | {"_core"},
    "session": _SESSION,
    "connectors": _SESSION | {"session", "_core"},
    "sweep": _ENGINES | {"_core"},
    "worker": _ENGINES | {"sweep", "_core"},
    "diagnose": _ENGINES | {"sweep", "_core"},
    "pd": _ENGINES | {"sweep.result"},
    "report": _BASE
    | {"tuning"}
    | {"sweep.result", "diagnose.result", "pd.result", "pd.summary", "pd.plan_summary"}
    | {"pd.experiment_result"}
    | {"diagnose.facts", "diagnose.figures"},
    "pytest_plugin": _ENGINES | {"sweep", "facade"},
    "cli": _ENGINES | _TOOLS | {"_core", "facade"},
    "bench": _ENGINES | {"sweep", "pd", "facade"},
}

# Third-party names and their homes under kvxfer/; what is not listed has none.
HOMES: dict[str, tuple[str, ...]] = {
    "numpy": ("",),
    "msgspec": tuple(f"{room}/" for room in sorted(_ENGINES | _TOOLS) if room != "layout"),
    "zmq": ("control/", "pd/", "connectors/lmcache"),
    "aiohttp": ("pd/proxy/",),
    "pynvml": ("transport/topology.py", "diagnose/"),
    "rich": ("report/", "cli/"),
    "matplotlib": ("report/pd_cdf.py", "report/experiment_plots.py"),
    "torch": (
        "sweep/compute.py",
        "connectors/vllm/connector.py",
        "connectors/vllm/cpu_event.py",
        "connectors/vllm/page_sums.py",
        "connectors/lmcache",
    ),
    "cupy": ("sweep/compute.py",),
    "nixl": ("transport/nixl", "connectors/nixl_agent", "sweep/peers/"),
    "mooncake": ("sweep/peers/",),
    "ucxx": ("transport/ucx", "sweep/peers/"),
    "ucp": ("transport/ucx", "sweep/peers/"),
    "libucx": ("transport/ucx",),
    "vllm": (
        "connectors/vllm",
        "connectors/lmcache/connector.py",
        "connectors/nixl_agent/plugin.py",
        "pd/",
    ),
    "transformers": ("pd/demo/smollm.py",),
    "gguf": ("pd/demo/smollm.py",),
    "lmcache": ("connectors/lmcache",),
    "pytest": ("pytest_plugin.py",),
}
LAZY = {"torch", "cupy"}
UNSAFE_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def read_tree() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for folder in ("kvxfer", "csrc", "tests", "bench")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in SUFFIXES
    }


# What Python files import.


@dataclass(frozen=True)
class Import:
    path: str
    line: int
    target: str
    lazy: bool  # inside a function
    typing_only: bool  # under `if TYPE_CHECKING`

    @property
    def top(self) -> str:
        return self.target.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: imports {self.target}"


def room_of(path: str) -> str:
    parts = PurePosixPath(path).parts
    return parts[1] if len(parts) > 2 else PurePosixPath(path).stem


def targets_of(node: ast.AST, path: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom):
        base = [node.module] if node.module else []
        if node.level:
            base = [*PurePosixPath(path).parts[: -node.level], *base]
        return [".".join([*base, name.name]) for name in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = ast.unparse(node.func).rpartition(".")[2]
        if called in ("import_module", "__import__"):
            return [str(node.args[0].value)]
    return []


def imports_of(path: str, source: str) -> Iterator[Import]:
    def walk(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[Import]:
        for target in targets_of(node, path):
            yield Import(path, getattr(node, "lineno", 0), target, lazy, typing_only)
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        typing_only = typing_only or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        for child in ast.iter_child_nodes(node):
            yield from walk(child, lazy, typing_only)

    yield from walk(ast.parse(source), False, False)


def package_imports(sources: Sources, folder: str = "kvxfer/") -> Iterator[Import]:
    for path, source in sources.items():
        if path.startswith(folder) and path.endswith(".py"):
            yield from imports_of(path, source)


def package_nodes(sources: Sources) -> Iterator[tuple[str, ast.AST]]:
    for path, source in sources.items():
        if path.startswith("kvxfer/") and path.endswith(".py"):
            yield from ((path, node) for node in ast.walk(ast.parse(source)))


def allows(arrows: set[str], target: str) -> bool:
    """Whether `target` (kvxfer.room.module...) is one of `arrows`."""
    room, _, rest = target.removeprefix("kvxfer").removeprefix(".").partition(".")
    if room == "__version__":
        return True
    if room not in ARROWS and room != "_core":
        room = "facade"
    return room in arrows or f"{room}.{rest.partition('.')[0]}" in arrows


# Rules for Python.


def python_arrows(sources: Sources) -> list[str]:
    complaints = []
    for found in [*package_imports(sources), *package_imports(sources, "bench/")]:
        room = "bench" if found.path.startswith("bench/") else room_of(found.path)
        if room not in ARROWS:
            complaints.append(f"{found.path}: the room {room} is not in ARROWS; add it")
        elif found.top == "kvxfer" and not allows({room, *ARROWS[room]}, found.target):
            complaints.append(f"{found}: not an arrow of {room}")
        elif found.top == "bench" != room:
            complaints.append(f"{found}: nothing imports bench")
    return complaints


def lazy_facade(sources: Sources) -> list[str]:
    return [
        f"{found}: kvxfer/__init__.py loads its names on first use"
        for found in package_imports(sources, "kvxfer/__init__.py")
        if not found.lazy and not found.typing_only and found.top not in sys.stdlib_module_names
    ]


def third_party_homes(sources: Sources) -> list[str]:
    complaints = []
    for found in package_imports(sources):
        if found.top == "kvxfer" or found.top in sys.stdlib_module_names:
            continue
        homes = HOMES.get(found.top, ())
        if not any(found.path.startswith(f"kvxfer/{home}") for home in homes):
            complaints.append(f"{found}: its home is {' or '.join(homes) or 'nowhere yet'}")
        if found.top in LAZY and not found.lazy and not found.typing_only:
            complaints.append(f"{found}: only inside a function")
    return complaints


def environment_readers(sources: Sources) -> list[str]:
    complaints = []
    for path, node in package_nodes(sources):
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = [name.name for name in node.names]
        if path != "kvxfer/env.py" and ENVIRONMENT & set(names):
            complaints.append(f"{path}:{node.lineno}: only kvxfer/env.py reads the environment")
    return complaints


def unsafe_decoding(sources: Sources) -> list[str]:
    complaints = [
        f"{found}: runs code from bytes"
        for found in package_imports(sources)
        if found.top in UNSAFE_MODULES
    ]
    for path, node in package_nodes(sources):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id
        option = isinstance(node, ast.keyword) and node.arg
        if called in ("eval", "exec") or option == "allow_pickle":
            complaints.append(f"{path}:{node.lineno}: {called or option} runs code from data")
    return complaints


def printing(sources: Sources) -> list[str]:
    return [
        f"{path}:{node.lineno}: print belongs in cli/ and report/; log or return it"
        for path, node in package_nodes(sources)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and room_of(path) not in ("cli", "report")
    ]


def file_sizes(sources: Sources) -> list[str]:
    return [
        f"{path}: {source.count(chr(10))} lines; split it at {MAX_LINES}"
        for path, source in sources.items()
        if source.count("\n") > MAX_LINES
    ]


RULES: tuple[Rule, ...] = (
    python_arrows,
    lazy_facade,
    third_party_homes,
    environment_readers,
    unsafe_decoding,
    printing,
    file_sizes,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Rule) -> None:
    assert rule(read_tree()) == []


def test_the_tree_was_read() -> None:
    tree = read_tree()
    for path in ("kvxfer/layout/plan.py", "csrc/copy/bulk_copy.cu", "tests/test_architecture.py"):
        assert tree[path], path
    assert {imported.top for imported in package_imports(tree)} >= {"kvxfer", "zmq", "numpy"}


PLANTED: list[tuple[Rule, str, str]] = [
    (python_arrows, "kvxfer/layout/a.py", "from kvxfer.memory import KVCache"),
    (python_arrows, "kvxfer/layout/a.py", "from ..memory import KVCache"),
    (python_arrows, "kvxfer/memory/a.py", "import kvxfer.transport.shm"),
    (python_arrows, "kvxfer/transport/a.py", "from kvxfer.control import ControlClient"),
    (python_arrows, "kvxfer/transport/a.py", "def f():\n    from kvxfer.session import Peer"),
    (python_arrows, "kvxfer/control/a.py", "from kvxfer import transport"),
    (python_arrows, "kvxfer/control/a.py", "import_module('kvxfer.transport')"),
    (python_arrows, "kvxfer/session/a.py", "from kvxfer import _core"),
    (python_arrows, "kvxfer/session/a.py", "from kvxfer.connectors import vllm"),
    (python_arrows, "kvxfer/session/a.py", "from kvxfer import Endpoint"),
    (python_arrows, "kvxfer/sweep/a.py", "from kvxfer.report import tables"),
    (python_arrows, "kvxfer/sweep/a.py", "from kvxfer.cli import main"),
    (python_arrows, "kvxfer/sweep/a.py", "import bench.bench_copy"),
    (python_arrows, "kvxfer/sweep/a.py", "from kvxfer.worker import DecodeWorker"),
    (python_arrows, "kvxfer/worker/a.py", "from kvxfer.cli.serve import run"),
    (python_arrows, "kvxfer/report/a.py", "from kvxfer.sweep.measure import run"),
    (python_arrows, "kvxfer/errors.py", "from kvxfer.units import parse"),
    (python_arrows, "kvxfer/attic/a.py", "from kvxfer.errors import KvxferError"),
    (python_arrows, "bench/bench_a.py", "from kvxfer import _core"),
    (python_arrows, "bench/bench_a.py", "from kvxfer.cli import main"),
    (lazy_facade, "kvxfer/__init__.py", "from kvxfer.layout import plan"),
    (lazy_facade, "kvxfer/__init__.py", "import numpy"),
    (third_party_homes, "kvxfer/session/a.py", "import zmq"),
    (third_party_homes, "kvxfer/transport/nvlink.py", "import pynvml"),
    (third_party_homes, "kvxfer/sweep/a.py", "from rich.table import Table"),
    (third_party_homes, "kvxfer/memory/a.py", "def f():\n    import torch"),
    (third_party_homes, "kvxfer/sweep/compute.py", "import cupy"),
    (third_party_homes, "kvxfer/transport/a.py", "from nixl._api import nixl_agent"),
    (third_party_homes, "kvxfer/sweep/a.py", "import ucxx"),
    (third_party_homes, "kvxfer/sweep/a.py", "import_module('mooncake.engine')"),
    (third_party_homes, "kvxfer/session/a.py", "import vllm.config"),
    (third_party_homes, "kvxfer/connectors/vllm.py", "import lmcache"),
    (third_party_homes, "kvxfer/layout/a.py", "import msgspec"),
    (third_party_homes, "kvxfer/sweep/a.py", "import pandas"),
    (environment_readers, "kvxfer/sweep/a.py", "import os\nos.environ['HOME']"),
    (environment_readers, "kvxfer/cli/a.py", "import os\nos.getenv('HOME')"),
    (environment_readers, "kvxfer/cli/a.py", "from os import environ"),
    (unsafe_decoding, "kvxfer/control/a.py", "import pickle"),
    (unsafe_decoding, "kvxfer/control/a.py", "from marshal import loads"),
    (unsafe_decoding, "kvxfer/sweep/a.py", "def f():\n    import dill"),
    (unsafe_decoding, "kvxfer/sweep/a.py", "eval('1')"),
    (unsafe_decoding, "kvxfer/sweep/a.py", "numpy.load('f', allow_pickle=True)"),
    (printing, "kvxfer/sweep/a.py", "print('done')"),
    (file_sizes, "tests/unit/a.py", "x = 1\n" * (MAX_LINES + 1)),
]


@pytest.mark.parametrize(("rule", "path", "source"), PLANTED)
def test_the_rule_sees_a_planted_violation(rule: Rule, path: str, source: str) -> None:
    complaints = rule({path: source})
    assert len(complaints) == 1
    assert path in complaints[0]


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for rule, *_ in PLANTED} == set(RULES)


INNOCENT: Sources = {
    "kvxfer/__init__.py": "from typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n    from kvxfer.layout import plan\n",
    "kvxfer/env.py": "import os\nos.environ.get('KVXFER_X')",
    "kvxfer/control/a.py": "import os\nimport zmq\nfrom kvxfer import errors\nos.getpid()",
    "kvxfer/sweep/compute.py": "def f():\n    import torch\n    torch.nn.Linear(1, 1).eval()",
    "kvxfer/cli/a.py": "import rich\nfrom kvxfer import __version__\nprint(__version__)",
    "tests/unit/a.py": "import pickle\nprint(1)\n" * (MAX_LINES // 2),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_lets_the_innocent_pass(rule: Rule) -> None:
    assert rule(INNOCENT) == []
