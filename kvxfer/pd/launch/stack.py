"""A running set-up: stores, engines started together, the proxy; watched, and ended as one."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kvxfer.closing import Closing
from kvxfer.errors import ControlTimeout, PeerLost
from kvxfer.pd import client
from kvxfer.pd.launch.child import Child, close_all
from kvxfer.pd.launch.engines import Program
from kvxfer.pd.launch.ports import LOOPBACK, require_free

START_S: Final = 600.0  # a model of 120B parameters took 280 s
_LOOK_S = 0.25
_HEALTH_S = 2.0
_TAIL_LINES = 25
_BUDGET = re.compile(r"max_num_batched_tokens=([0-9]{1,9})")

State = Literal["waiting", "starting", "up", "ended"]


@dataclass(frozen=True, slots=True)
class ProgramState:
    """What one program does at an instant; ``age_s`` since it was started."""

    name: str
    state: State
    age_s: float


Watcher = Callable[[Sequence[ProgramState]], None]


class Stack(Closing):
    """Engines, for ``pd`` a proxy, beside one engine perhaps stores. A context manager.

    Nothing that it started runs on after :meth:`close`, nor after the death of this process.
    """

    def __init__(
        self,
        engines: Sequence[Program],
        proxy: Program | None,
        folder: Path,
        *,
        host: str,
        stores: Sequence[Program] = (),
    ) -> None:
        """Check the ports and start all engines at once, or the stores that they need.

        Args:
            engines: at least one.
            proxy: is started by :meth:`wait_up`, once engines answer; None = clients talk to the
                one engine.
            folder: an empty one, for logs.
            host: the address that the proxy binds; engines bind loopback.
            stores: what engines cannot start without; they are started by :meth:`wait_up` then.
                The first is the one that the engine asks.

        Raises:
            NotAvailable: a port is in use.
        """
        proxies = () if proxy is None else (proxy,)
        self._engines = tuple(engines)
        self._proxy = proxy
        self._store = stores[0] if stores else None
        self._folder = folder
        self._children: list[tuple[Program, Child, float]] = []
        self._up: set[str] = set()
        first, *self._later = [wave for wave in (stores, self._engines, proxies) if wave]
        local = (*stores, *engines)
        require_free(LOOPBACK, (port for program in local for port in program.ports))
        if proxy is not None:
            require_free(host, proxy.ports)
        try:
            for program in first:
                self._start(program)
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Where clients ask."""
        return self._engines[0].url if self._proxy is None else self._proxy.url

    @property
    def engines(self) -> tuple[Program, ...]:
        """The engines, prefill engines first."""
        return self._engines

    @property
    def store(self) -> Program | None:
        """The store that the engine asks, where there is one."""
        return self._store

    @property
    def folder(self) -> Path:
        """Where programs stand, with their logs."""
        return self._folder

    def wait_up(self, timeout_s: float = START_S, watch: Watcher | None = None) -> None:
        """Wait until every program is healthy.

        Args:
            timeout_s: for all of them together.
            watch: is told of the states several times a second.

        Raises:
            PeerLost: a program ended; with the last lines of its log.
            ControlTimeout: the deadline passed; with the last lines of those that are not up.
        """
        deadline_s = time.monotonic() + timeout_s
        self._wait_healthy(deadline_s, watch)
        while self._later:
            for program in self._later.pop(0):
                self._start(program)
            self._wait_healthy(deadline_s, watch)

    def require_alive(self) -> None:
        """Check that every program runs.

        Raises:
            PeerLost: one ended; with the last lines of its log.
        """
        for _, child, _ in self._children:
            if (status := child.poll()) is not None:
                raise PeerLost(f"{child.name} ended with status {status}\n{_last_lines(child)}")

    def states(self) -> list[ProgramState]:
        """Of every program, also of those that are not started yet."""
        now_s = time.monotonic()
        states = [
            ProgramState(program.name, self._state_of(program, child), now_s - started_s)
            for program, child, started_s in self._children
        ]
        later = [program for wave in self._later for program in wave]
        return states + [ProgramState(program.name, "waiting", 0.0) for program in later]

    def token_budget(self) -> int | None:
        """Most tokens of one step, as the first engine logged it; None where it did not."""
        first = self._engines[0].name
        child = next(child for program, child, _ in self._children if program.name == first)
        with child.log.open(encoding="utf-8", errors="replace") as log:
            found = next(filter(None, map(_BUDGET.search, log)), None)
        return None if found is None else int(found[1])

    def close(self) -> None:
        """End all programs at once; the proxy first, so that it starts nothing new."""
        close_all([child for _, child, _ in reversed(self._children)])

    def _start(self, program: Program) -> None:
        for name, text in program.files.items():
            (self._folder / name).write_text(text, encoding="utf-8")
        child = Child(
            program.name,
            program.words,
            environment=program.environment,
            folder=self._folder,
        )
        self._children.append((program, child, time.monotonic()))

    def _state_of(self, program: Program, child: Child) -> State:
        if child.poll() is not None:
            return "ended"
        return "up" if program.name in self._up else "starting"

    def _wait_healthy(self, deadline_s: float, watch: Watcher | None) -> None:
        while True:
            self.require_alive()
            missing = [pair for pair in self._children if pair[0].name not in self._up]
            for program, _, _ in missing:
                if client.is_healthy(program.url, _HEALTH_S, program.health):
                    self._up.add(program.name)
            if watch is not None:
                watch(self.states())
            missing = [pair for pair in missing if pair[0].name not in self._up]
            if not missing:
                return
            if time.monotonic() > deadline_s:
                late = "\n".join(
                    f"{program.name}:\n{_last_lines(child)}" for program, child, _ in missing
                )
                raise ControlTimeout(f"not up in time; give more with --start-timeout\n{late}")
            time.sleep(_LOOK_S)


def _last_lines(child: Child) -> str:
    lines = [f"  {line}" for line in child.tail(_TAIL_LINES)]
    if not lines:
        return f"  (it has written nothing to {child.log})"
    return "\n".join([*lines, f"  (all of it: {child.log})"])
