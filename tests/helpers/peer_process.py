"""A `PeerHost` in a child process or in this one, behind one interface."""

import base64
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cache_content import Bytes, CacheShape
from peer_host import PeerHost

DEADLINE_S = 30.0  # far above what any call takes; it only keeps a failure from hanging
_CHILD = Path(__file__).with_name("peer_host.py")


class RemoteError(Exception):
    """What a call raised at the peer; ``kind`` is the name of its class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class RemotePeer(ABC):
    """The far side of a test."""

    shape: CacheShape

    @abstractmethod
    def call(self, name: str, **args: Any) -> Any:
        """Run a method of `PeerHost` there."""

    @abstractmethod
    def start(self, name: str, **args: Any) -> Callable[[], Any]:
        """Begin a method that announces itself; returns once it has, with a way to its result."""

    @abstractmethod
    def release(self) -> None:
        """Close the cache that is served there, if anybody is left to do so."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""

    def open(self, shape: CacheShape, **args: Any) -> dict[str, Any]:
        """Serve a cache of ``shape``."""
        self.shape = shape
        opened: dict[str, Any] = self.call(
            "open",
            layout=shape.fields,
            num_blocks=shape.num_blocks,
            num_arrays=shape.num_arrays,
            **args,
        )
        return opened

    def content(self) -> Bytes:
        """Its pages and guards."""
        data = base64.b64decode(self.call("encoded_content"))
        return np.frombuffer(data, np.uint8).reshape(self.shape.num_arrays, -1)


class InThisProcess(RemotePeer):
    """For transports that stay in one process."""

    def __init__(self, host: Any = None) -> None:
        self.host = PeerHost() if host is None else host

    def call(self, name: str, **args: Any) -> Any:
        return getattr(self.host, name)(**args)

    def start(self, name: str, **args: Any) -> Callable[[], Any]:
        ready = threading.Event()
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append(self.call(name, announce=ready.set, **args))
            finally:
                ready.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert ready.wait(DEADLINE_S), f"{name} did not announce itself"

        def result() -> Any:
            thread.join(DEADLINE_S)
            assert outcome, f"{name} failed, or hangs"
            return outcome[0]

        return result

    def release(self) -> None:
        self.host.close()

    def close(self) -> None:
        self.host.close()


class ChildProcess(RemotePeer):
    """A child that ends with this object, or when this process dies and its input closes."""

    def __init__(self, program: Path = _CHILD, env: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | (env or {}),
            bufsize=0,  # what could not be written to a dead child must not fail its close
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input = self._process.stdin
        self._output = self._process.stdout.fileno()
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, name: str, **args: Any) -> Any:
        self._send(name, args)
        return self._result()

    def start(self, name: str, **args: Any) -> Callable[[], Any]:
        self._send(name, args)
        first = self._read()
        assert first == {"ready": True}, first
        return self._result

    def kill(self) -> None:
        """End it as a crash would, and leave it unreaped, as a busy parent would."""
        self._process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def reap(self) -> int:
        """Wait for its end; returns its exit status."""
        return self._process.wait(DEADLINE_S)

    def release(self) -> None:
        if self._process.poll() is None:
            self.call("close")

    def close(self) -> None:
        self._input.close()
        try:
            self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            assert self._process.stdout is not None
            self._process.stdout.close()

    def __enter__(self) -> "ChildProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, name: str, args: dict[str, Any]) -> None:
        left = json.dumps({"call": name, "args": args}).encode() + b"\n"
        end_s = time.monotonic() + DEADLINE_S
        while left:  # a child that hangs takes no more than fits into the pipe
            wait_s = max(0.0, end_s - time.monotonic())
            _, writable, _ = select.select([], [self._input], [], wait_s)
            assert writable, f"{name}: the child does not take its {len(left)} bytes"
            left = left[os.write(self._input.fileno(), left[: select.PIPE_BUF]) :]

    def _result(self) -> Any:
        answer = self._read()
        if "error" in answer:
            raise RemoteError(answer["error"], answer["message"])
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        end_s = time.monotonic() + DEADLINE_S
        while b"\n" not in self._buffer:
            left_s = end_s - time.monotonic()
            ready, _, _ = select.select([self._output], [], [], max(left_s, 0.0))
            assert ready, f"process {self.pid} has not answered within {DEADLINE_S} s"
            data = os.read(self._output, 1 << 20)
            assert data, f"process {self.pid} ended in a call; see its standard error"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer
