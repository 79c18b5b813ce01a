"""Two LMCache engines in processes of their own, a sender and a receiver, and the proxy's ear."""

import select
from pathlib import Path
from typing import Any

import msgspec
import zmq
from free_ports import free_ports
from peer_process import ChildProcess

PROGRAM = Path(__file__).with_name("lmcache_host.py")
MP_PROGRAM = PROGRAM.with_name("lmcache_mp_host.py")
CLIENT_PROGRAM = PROGRAM.with_name("lmcache_client_host.py")
PAGE_BYTES = 2 << 20
NUM_PAGES = 32
HOST = "127.0.0.1"
MODES = ("async", "sync")
START_S = 240.0
ENVIRONMENT = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "PYTHONHASHSEED": "0",
    "CUDA_VISIBLE_DEVICES": "",
}


class HostProcess(ChildProcess):
    """A process that can have an engine, and another once that is shut."""

    def __init__(self, env: dict[str, str] | None = None, program: Path = PROGRAM) -> None:
        super().__init__(program, env=ENVIRONMENT | (env or {}))
        self._is_ready = False

    def call(self, name: str, **args: Any) -> Any:
        if not self._is_ready:
            # LMCache and torch take their time on a busy machine.
            ready, _, _ = select.select([self._output], [], [], START_S)
            assert ready, f"LMCache was not imported within {START_S} s"
            assert self._read() == {"ready": True}
            self._is_ready = True
        return super().call(name, **args)


class Hosts:
    """Processes that are used again, because each takes seconds to start."""

    def __init__(self, count: int) -> None:
        self._idle = [HostProcess() for _ in range(count)]

    def take(self) -> HostProcess:
        return self._idle.pop() if self._idle else HostProcess()

    def give_back(self, process: HostProcess) -> None:
        self._idle.append(process)

    def close(self) -> None:
        for process in self._idle:
            process.close()


class Proxy:
    """Hears which requests are said to be over at their decoder."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self.port = self._socket.bind_to_random_port(f"tcp://{HOST}")

    def hear(self, timeout_s: float = 60.0) -> str | None:
        """The next request's id; None if there is none in time."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        return str(msgspec.msgpack.decode(self._socket.recv())["req_id"])

    def close(self) -> None:
        self._context.destroy(linger=0)


class Side:
    """An engine of one role, in a process of its own."""

    def __init__(
        self, process: HostProcess, role: str, mode: str, ports: dict[str, Any], *,
        channel: str = "kvxfer", installs: bool = True, upgrade: bool = False,
        extra: dict[str, Any] | None = None, config: dict[str, Any] | None = None,
        **metadata: Any,
    ) -> None:  # fmt: skip
        self.config: dict[str, Any] = {
            "chunk_size": 256, "local_cpu": False, "max_local_cpu_size": 0.0, "enable_pd": True,
            "pd_role": role, "pd_backend_mode": mode, "pd_buffer_size": NUM_PAGES * PAGE_BYTES,
            "pd_buffer_device": "cpu", "transfer_channel": channel, "nixl_backends": ["UCX"],
            "save_unfull_chunk": True, "extra_config": extra or {},
        } | ports | (config or {})  # fmt: skip
        self.process = process
        if installs:
            process.call("install", upgrade=upgrade)
        # What was installed stays; such a process is of no use to a test that wants it otherwise.
        self.is_reusable = installs and not upgrade and channel == "kvxfer"
        self.channel: str = process.call("open", config=self.config, **metadata)

    def call(self, name: str, **args: Any) -> Any:
        return self.process.call(name, **args)

    def kill(self) -> None:
        """End the process as a crash would."""
        self.is_reusable = False
        self.process.kill()
        self.process.reap()


class Pair:
    """A receiver and a sender that can be started in any order, and killed."""

    def __init__(self, hosts: Hosts, mode: str, **common: Any) -> None:
        self.mode, self._hosts, self._common = mode, hosts, common
        self.init_port, self.alloc_port = free_ports(2)
        self.proxy = Proxy()
        self.sides: list[Side] = []

    def receiver(self, **more: Any) -> Side:
        ports = {
            "pd_peer_host": HOST,
            "pd_peer_init_port": [self.init_port],
            "pd_peer_alloc_port": [self.alloc_port],
        }
        return self._side("receiver", ports, more)

    def sender(self, **more: Any) -> Side:
        ports = {"pd_proxy_host": HOST, "pd_proxy_port": self.proxy.port}
        return self._side("sender", ports, more)

    def spec(self, req_id: str, total_chunks: int = 4, **more: Any) -> dict[str, Any]:
        """What LMCache's adapter makes of a request's ``disagg_spec``."""
        return {
            "req_id": req_id,
            "receiver_host": HOST,
            "receiver_init_port": [self.init_port],
            "receiver_alloc_port": [self.alloc_port],
            "is_last_prefill": True,
            "total_chunks": total_chunks,
        } | more

    def close(self) -> None:
        for side in self.sides:
            if side.is_reusable and side.call("shut") >= 0:
                self._hosts.give_back(side.process)
            else:
                side.process.close()
        self.proxy.close()

    def _side(self, role: str, ports: dict[str, Any], more: dict[str, Any]) -> Side:
        env = more.pop("env", None)
        process = self._hosts.take() if env is None else HostProcess(env)
        try:
            side = Side(process, role, self.mode, ports, **(self._common | more))
        except BaseException:
            process.kill()  # half an engine does not end by itself
            process.close()
            raise
        side.is_reusable = side.is_reusable and env is None
        self.sides.append(side)
        return side
