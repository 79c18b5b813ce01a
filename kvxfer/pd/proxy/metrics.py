"""What the proxy counts."""

import time
from collections.abc import Callable, Sequence

from kvxfer.pd.proxy.engine import Engine
from kvxfer.pd.proxy.prometheus import (
    Counter,
    Gauge,
    Histogram,
    Metric,
    Reading,
    Values,
    exposition,
)

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
# Ten a decade, so that a percentile is known within about a quarter, and usual limits are bounds.
_STEPS = (1, 1.25, 1.6, 2, 2.5, 3, 4, 5, 6, 8)
_WAITS_S = (*(step * scale for scale in (1e-3, 1e-2, 0.1, 1, 10) for step in _STEPS), 100, 200, 400)
_TOKENS = tuple(float(1 << exponent) for exponent in range(21))
_ENGINE = ("role", "engine")  # labels


class Metrics:
    """All of it, under the prefix ``kvxfer_proxy_``."""

    def __init__(self, engines: Sequence[Engine], connector: str = "kvxfer") -> None:
        self.num_running = 0
        self._engines = engines
        self._all: list[Metric] = [
            *self._counters(),
            *self._histograms(),
            *self._of_process(connector),
            *self._of_engines(),
        ]

    def _counters(self) -> list[Metric]:
        self.requests = Counter(
            "kvxfer_proxy_requests_total",
            "Requests, by the status that was answered, or of an error amid the answer.",
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
            (*_ENGINE, "outcome"),
        )
        self.discarded = Counter(
            "kvxfer_proxy_discarded_total",
            "Hand-overs that nobody wanted, taken off the engines.",
            ("outcome",),
        )
        self.notices = Counter(
            "kvxfer_proxy_notices_total", "LMCache's notices of KV that has arrived.", ("outcome",)
        )
        self.estimated = Counter(
            "kvxfer_proxy_prompts_estimated_total",
            "Prompts whose tokens were estimated from their bytes.",
        )
        return [
            self.requests, self.alone, self.gone, self.retries, self.legs, self.discarded,
            self.notices, self.estimated,
        ]  # fmt: skip

    def _histograms(self) -> list[Metric]:
        self.prefill_s = Histogram(
            "kvxfer_proxy_prefill_seconds", "From a request to its prefill's answer.", _SECONDS
        )
        self.first_byte_s = Histogram(
            "kvxfer_proxy_first_byte_seconds",
            "From a request to the first byte.",
            _SECONDS,
        )
        self.ttft_s = Histogram(
            "kvxfer_proxy_time_to_first_token_seconds",
            "Of streams that have ended, as the client sees it.",
            _WAITS_S,
        )
        self.first_gap_s = Histogram(
            "kvxfer_proxy_first_gap_seconds",
            "From the first token of a stream to its second.",
            _WAITS_S,
        )
        self.itl_s = Histogram(
            "kvxfer_proxy_inter_token_latency_seconds",
            "Gaps of streams, first ones included.",
            _WAITS_S,
        )
        self.tpot_s = Histogram(
            "kvxfer_proxy_time_per_output_token_seconds", "Mean gap of each stream.", _WAITS_S
        )
        self.e2el_s = Histogram(
            "kvxfer_proxy_e2e_latency_seconds",
            "From a request to the end of its answer, of 200s.",
            _WAITS_S,
        )
        self.prompt_tokens = Histogram(
            "kvxfer_proxy_prompt_tokens", "Of each answered request.", _TOKENS
        )
        self.output_tokens = Histogram(
            "kvxfer_proxy_output_tokens", "Of each stream that came to its end.", _TOKENS
        )
        return [
            self.prefill_s, self.first_byte_s, self.ttft_s, self.first_gap_s, self.itl_s,
            self.tpot_s, self.e2el_s, self.prompt_tokens, self.output_tokens,
        ]  # fmt: skip

    def _of_process(self, connector: str) -> list[Metric]:
        began_s = time.time()
        return [
            Gauge(
                "process_start_time_seconds", "When the proxy began, in Unix time.", (),
                lambda: [((), began_s)],
            ),
            Gauge(
                "kvxfer_proxy_info", "1; its label says what moves KV.", ("connector",),
                lambda: [((connector,), 1)],
            ),
            Gauge(
                "kvxfer_proxy_requests_running", "Requests that are being answered.", (),
                lambda: [((), self.num_running)],
            ),
        ]  # fmt: skip

    def _of_engines(self) -> list[Metric]:
        return [
            Reading(
                "kvxfer_proxy_engine_busy_seconds_total", "With one request or more.", _ENGINE,
                self._each(lambda engine: engine.work.up_to_now().busy_s),
            ),
            Reading(
                "kvxfer_proxy_engine_request_seconds_total", "Of all requests together.", _ENGINE,
                self._each(lambda engine: engine.work.up_to_now().request_s),
            ),
            Gauge(
                "kvxfer_proxy_engine_up", "1 where the engine takes requests.", _ENGINE,
                self._each(lambda engine: engine.is_up),
            ),
            Gauge(
                "kvxfer_proxy_engine_requests", "Requests that the engine has.", _ENGINE,
                self._each(lambda engine: engine.outstanding_requests),
            ),
            Gauge(
                "kvxfer_proxy_engine_tokens", "Tokens of those, as estimated for routing.", _ENGINE,
                self._each(lambda engine: engine.outstanding_tokens),
            ),
        ]  # fmt: skip

    def _each(self, read: Callable[[Engine], float]) -> Callable[[], Values]:
        return lambda: [((engine.role, engine.name), read(engine)) for engine in self._engines]

    def leg(self, engine: Engine, outcome: object) -> None:
        """Count a leg's end."""
        self.legs.add(engine.role, engine.name, str(outcome))

    def page(self) -> str:
        """All of it as text."""
        return exposition(self._all)
