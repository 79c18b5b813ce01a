"""LMCache's multiprocess server and its coordinator, as the programs that its users run."""

import json
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from free_ports import free_port, free_ports
from lmcache_pairs import ENVIRONMENT, HOST, START_S
from waiting import eventually

_LMCACHE = Path(sys.executable).with_name("lmcache")
_END_S = 20.0


def _dicts(found: Any, key: str) -> list[dict[str, Any]]:
    """All that have the key, wherever they are."""
    inner = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    below = [one for value in inner for one in _dicts(value, key)]
    return [found, *below] if isinstance(found, dict) and key in found else below


class Program:
    """One command of ``lmcache``, which listens on a port once it works."""

    def __init__(self, port: int, *words: str) -> None:
        self.port = port
        self._process = subprocess.Popen(
            [_LMCACHE, *words], env=os.environ | ENVIRONMENT, stdout=subprocess.DEVNULL
        )

    def await_ready(self) -> None:
        eventually(self._listens, f"no LMCache at port {self.port}", START_S)

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _listens(self) -> bool:
        assert self._process.poll() is None, f"it ended with {self._process.returncode}"
        with socket.socket() as probe:
            return probe.connect_ex((HOST, self.port)) == 0


class Coordinator(Program):
    """Tells servers of each other."""

    def __init__(self) -> None:
        port = free_port()
        super().__init__(port, "coordinator", "--host", HOST, "--port", str(port))
        self.url = f"http://{HOST}:{port}"


class Server(Program):
    """A server with kvxfer's L2 plug-in; with a coordinator, in peer-to-peer on kvxfer's channel.

    Attributes:
        url: where clients come.
    """

    def __init__(
        self,
        coordinator: Coordinator | None = None,
        policy: str = "default",
        **adapter_params: Any,
    ) -> None:
        port, http_port, p2p_port = free_ports(3)
        self.url = f"tcp://{HOST}:{port}"
        plugin = {
            "type": "plugin",
            "module_path": "kvxfer.connectors.lmcache.mp",
            "class_name": "KvxferL2",
            "adapter_params": adapter_params,
        }
        p2p = [] if coordinator is None else [
            "--coordinator-url", coordinator.url, "--coordinator-advertise-ip", HOST,
            "--coordinator-heartbeat-interval", "0.5",
            "--p2p-advertise-url", f"{HOST}:{p2p_port}", "--p2p-transfer-engine", "kvxfer",
        ]  # fmt: skip
        super().__init__(
            http_port, "server", "--host", HOST, "--port", str(port),
            "--http-host", HOST, "--http-port", str(http_port), "--l1-size-gb", "0.1",
            "--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven",
            "--disable-observability", "--l2-adapter", json.dumps(plugin),
            "--l2-store-policy", policy, *p2p,
        )  # fmt: skip

    def counts(self) -> dict[str, Any]:
        """What its L2 plug-in says of itself in the server's status."""
        with urllib.request.urlopen(f"http://{HOST}:{self.port}/status", timeout=20.0) as page:
            (plugin,) = _dicts(json.load(page), "moved_to_peers")
        return plugin
