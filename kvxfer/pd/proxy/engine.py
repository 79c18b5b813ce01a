"""An engine as the proxy sees it: where it is, whether it is up, and what it has to do."""

import asyncio
import time
from dataclasses import dataclass, field

from kvxfer.control.addresses import format_url
from kvxfer.pd.proxy.options import EngineAddress, Role


@dataclass(slots=True, eq=False)
class Engine:
    """State of one engine; used on the event loop alone.

    Attributes:
        down_reason: why no request is sent there; empty where it is up.
        outstanding_tokens: of the requests that it has now, as the proxy estimates them.
        outstanding_requests: their number.
        suspected: set where a request found it dead, so that it is probed at once.
        work: how long it has had requests.
    """

    address: EngineAddress
    down_reason: str = "not asked yet"
    outstanding_tokens: int = 0
    outstanding_requests: int = 0
    suspected: asyncio.Event = field(default_factory=asyncio.Event)
    work: "Work" = field(default_factory=lambda: Work())

    def __str__(self) -> str:
        return f"{self.role} engine {self.name}"

    @property
    def role(self) -> Role:
        """What it is for."""
        return self.address.role

    @property
    def name(self) -> str:
        """``host:port``."""
        return self.url.removeprefix("http://")

    @property
    def url(self) -> str:
        """Of its HTTP server, without a path."""
        return format_url(self.address.host, self.address.port).replace("tcp://", "http://", 1)

    @property
    def is_up(self) -> bool:
        """Whether requests go there."""
        return not self.down_reason

    def suspect(self, reason: str) -> None:
        """Send nothing there until a probe has been answered."""
        self.down_reason = reason
        self.suspected.set()

    def carry(self, num_tokens: int) -> "Load":
        """Count a request; its `Load` takes it off again."""
        return Load(self, num_tokens)


@dataclass(slots=True)
class Work:
    """How long an engine has had requests, to the last change of their number.

    Attributes:
        busy_s: seconds with one or more.
        request_s: seconds of all of them together: the mean number in flight, times the time.
    """

    busy_s: float = 0.0
    request_s: float = 0.0
    _num_requests: int = 0
    _since_s: float = field(default_factory=time.monotonic)

    def up_to_now(self) -> "Work":
        """Itself, with the time since the last change."""
        self.change(0)
        return self

    def change(self, by: int) -> None:
        """So many more requests from now on."""
        now_s = time.monotonic()
        passed_s, self._since_s = now_s - self._since_s, now_s
        self.request_s += passed_s * self._num_requests
        self.busy_s += passed_s if self._num_requests else 0.0
        self._num_requests += by


class Load:
    """One request on one engine, for as long as it lasts."""

    def __init__(self, engine: Engine, num_tokens: int) -> None:
        self._engine: Engine | None = engine
        self._num_tokens = num_tokens
        engine.outstanding_tokens += num_tokens
        engine.outstanding_requests += 1
        engine.work.change(1)

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Take it off; once."""
        if self._engine is not None:
            self._engine.outstanding_tokens -= self._num_tokens
            self._engine.outstanding_requests -= 1
            self._engine.work.change(-1)
            self._engine = None
