"""What the proxy counts."""

from collections.abc import Callable, Sequence

from kvxfer.pd.proxy.engine import Engine
from kvxfer.pd.proxy.prometheus import Counter, Gauge, Histogram, Metric, Values, exposition

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """All of it, under the prefix ``kvxfer_proxy_``."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        def of_engines(read: Callable[[Engine], float]) -> Callable[[], Values]:
            return lambda: [((e.role, e.name), read(e)) for e in engines]

        named = ("role", "engine")
        self.num_running = 0
        self.requests = Counter(
            "kvxfer_proxy_requests_total",
            "Requests, by the status that was answered.",
            ("path", "status"),
        )
        self.alone = Counter(
            "kvxfer_proxy_alone_total",
            "Requests that a decode engine answered by itself.",
            ("reason",),
        )
        self.gone = Counter(
            "kvxfer_proxy_clients_gone_total", "Requests whose client left before the end."
        )
        self.retries = Counter(
            "kvxfer_proxy_retries_total",
            "Requests sent again, to other engines.",
        )
        self.legs = Counter(
            "kvxfer_proxy_legs_total",
            "Legs of requests, by status, or why none.",
            (*named, "outcome"),
        )
        self.discarded = Counter(
            "kvxfer_proxy_discarded_total",
            "Hand-overs that nobody wanted, taken off the engines.",
            ("outcome",),
        )
        self.notices = Counter(
            "kvxfer_proxy_notices_total", "LMCache's notices of KV that has arrived.", ("outcome",)
        )
        self.prefill_s = Histogram(
            "kvxfer_proxy_prefill_seconds", "From a request to its prefill's answer.", _SECONDS
        )
        self.first_byte_s = Histogram(
            "kvxfer_proxy_first_byte_seconds",
            "From a request to the first byte.",
            _SECONDS,
        )
        self._all: list[Metric] = [
            self.requests, self.alone, self.gone, self.retries, self.legs, self.discarded,
            self.notices, self.prefill_s, self.first_byte_s,
            Gauge(
                "kvxfer_proxy_requests_running", "Requests that are being answered.", (),
                lambda: [((), self.num_running)],
            ),
            Gauge(
                "kvxfer_proxy_engine_up", "1 where the engine takes requests.", named,
                of_engines(lambda engine: engine.is_up),
            ),
            Gauge(
                "kvxfer_proxy_engine_requests", "Requests that the engine has.", named,
                of_engines(lambda engine: engine.outstanding_requests),
            ),
            Gauge(
                "kvxfer_proxy_engine_tokens", "Tokens of those, as estimated for routing.", named,
                of_engines(lambda engine: engine.outstanding_tokens),
            ),
        ]  # fmt: skip

    def leg(self, engine: Engine, outcome: object) -> None:
        """Count a leg's end."""
        self.legs.add(engine.role, engine.name, str(outcome))

    def page(self) -> str:
        """All of it as text."""
        return exposition(self._all)
