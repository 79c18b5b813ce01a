"""Which UCX and NIXL are here, and which parts of theirs lie beside them. Nothing is connected.

UCX loads what it knows of verbs and CUDA from modules in a folder ``ucx`` beside its libraries
(``libuct_ib.so``, ``libuct_cuda.so``). NIXL's wheels bring a UCX of their own, and each plug-in as
a file.
"""

import importlib.util
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvxfer import _core
from kvxfer.errors import NotAvailable
from kvxfer.transport.ucx import library_candidates

_MAPS = Path("/proc/self/maps")
_NIXL = ("nixl_cu13", "nixl_cu12")
_PLUGIN = re.compile(r"libplugin_(\w+)\.so")


@dataclass(frozen=True, slots=True)
class NetworkLibrary:
    """A library that reaches peers.

    Attributes:
        version: its own.
        source: where it is from: ``system``, or the name of a package.
        has_verbs: whether it can use RDMA devices.
        has_cuda: whether it knows the memory of GPUs.
        plugins: of NIXL.
    """

    version: str
    source: str
    has_verbs: bool
    has_cuda: bool
    plugins: tuple[str, ...] = ()


def ucx_library() -> NetworkLibrary:
    """The UCX that the transport ``ucx`` uses.

    Raises:
        NotAvailable: this build has none, or none was found, and why.
    """
    found = _core.ucx_load(library_candidates())
    path = _mapped("libucp.so")
    if path is None:
        raise NotAvailable("UCX was opened, and /proc/self/maps does not say from where")
    source = "libucx" if "libucx" in path.parts else "system"
    verbs, cuda = _modules_in(path.parent / "ucx")
    return NetworkLibrary(found, source, verbs, cuda)


def nixl_library() -> NetworkLibrary:
    """The NIXL that the transport ``nixl`` uses; it is not imported.

    Raises:
        NotAvailable: it is not installed.
    """
    for name in _NIXL:
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations:
            return _nixl_at(name, Path(found.submodule_search_locations[0]).parent)
    raise NotAvailable("NIXL is not installed; pip install nixl-cu13")


def library_versions() -> dict[str, str]:
    """Versions by the name of the transport; one that is not here is left out."""
    versions = {}
    for name, find in (("ucx", ucx_library), ("nixl", nixl_library)):
        try:
            versions[name] = find().version
        except NotAvailable:
            continue
    return versions


def _nixl_at(name: str, folder: Path) -> NetworkLibrary:
    """The one whose package ``name`` lies in ``folder``."""
    package = name.replace("_", "-")
    try:
        number = version(package)
    except PackageNotFoundError:  # of a source tree
        number = "of unknown version"
    bundled = folder / f"{name}.libs"
    files = (_PLUGIN.fullmatch(path.name) for path in (bundled / "nixl").glob("libplugin_*"))
    plugins = tuple(sorted({file[1] for file in files if file}))
    return NetworkLibrary(number, package, *_modules_in(bundled / "ucx"), plugins)


def _modules_in(folder: Path) -> tuple[bool, bool]:
    """Whether UCX's modules in ``folder`` know verbs, and CUDA."""
    verbs, cuda = (any(folder.glob(f"libuct_{name}.so*")) for name in ("ib", "cuda"))
    return verbs, cuda


def _mapped(name: str) -> Path | None:
    for line in _MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(name):
            return Path("/" + path)
    return None
