"""From a set-up and a model to a running stack, in a folder of its own."""

import logging
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvxfer.errors import NotAvailable
from kvxfer.pd.launch.engines import engine_programs, proxy_program, store_programs
from kvxfer.pd.launch.ports import FRONT_PORT, LOOPBACK, PortPlan
from kvxfer.pd.launch.python_site import PythonSite
from kvxfer.pd.launch.spec import SetupSpec
from kvxfer.pd.launch.stack import START_S, Stack, Watcher
from kvxfer.pd.launch.stores import require_store
from kvxfer.pd.models import ServedModel
from kvxfer.transport import tuned

# Packages without which an engine with this connector ends, minutes later and at length.
_NEEDS: Final = {
    "nixl": ("nixl",),
    "lmcache": ("lmcache", "nixl"),
    "lmcache-together": ("lmcache", "kvxfer"),
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """How set-ups are started.

    Args:
        site: the Python of the engines.
        model: what they serve.
        logs: a folder that gets one for each set-up started.
        host, port: of the proxy.
        ports: of engines and connectors.
        start_timeout_s: until all programs of a set-up are healthy.
    """

    site: PythonSite
    model: ServedModel
    logs: Path
    host: str = LOOPBACK
    port: int = FRONT_PORT
    ports: PortPlan = field(default_factory=PortPlan)
    start_timeout_s: float = START_S

    def start(self, spec: SetupSpec, watch: Watcher | None = None) -> Stack:
        """Start a set-up and wait until it is up.

        Raises:
            InvalidUsage: it does not fit this machine or its ports.
            NotAvailable: a port is in use, or the proxy, connector or store lacks a package.
            PeerLost: a program ended; with the last lines of its log.
            ControlTimeout: it is not up in time.
        """
        if spec.kind == "pd" and find_spec("aiohttp") is None:
            raise NotAvailable("the proxy needs aiohttp: pip install aiohttp")
        missing = set(_NEEDS.get(spec.connector, ())).difference(self.site.versions)
        if missing:
            packages = " ".join(sorted(missing))
            raise NotAvailable(
                f"connector {spec.connector} needs {packages}, which {self.site.python} lacks: "
                f"pip install {packages}, or take --connector kvxfer"
            )
        require_store(spec.reuse, self.site)
        _log.info("tuning profile of kvxfer in engines: %s", tuned.in_use().text)
        engines = engine_programs(spec, self.model, self.site, self.ports)
        is_pd = spec.kind == "pd"
        proxy = proxy_program(spec, self.ports, self.host, self.port) if is_pd else None
        folder = Path(tempfile.mkdtemp(prefix=f"{spec.name}-", dir=self.logs))
        stores = store_programs(spec, self.site, self.ports)
        stack = Stack(engines, proxy, folder, host=self.host, stores=stores)
        try:
            stack.wait_up(self.start_timeout_s, watch)
        except BaseException:
            stack.close()
            raise
        return stack
