"""Pages of metrics for tests of advice: the proxy's own, and vLLM's as it writes them."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvxfer.pd.advise.observation import Observation, observe
from kvxfer.pd.advise.page import Page, parse_page
from kvxfer.pd.proxy.engine import Engine
from kvxfer.pd.proxy.metrics import Metrics
from kvxfer.pd.proxy.options import EngineAddress

INTERVAL_S = 100.0
# vLLM's own bounds of gaps, in seconds (v1/metrics/loggers.py).
VLLM_GAPS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)


@dataclass
class Proxied:
    """What a proxy has counted; `seen` is the difference to its start."""

    num_prefill: int = 1
    num_decode: int = 1
    connector: str = "kvxfer"
    metrics: Metrics = field(init=False)
    engines: list[Engine] = field(init=False)

    def __post_init__(self) -> None:
        self.engines = [
            Engine(EngineAddress("prefill" if at < self.num_prefill else "decode", "h", 1 + at))
            for at in range(self.num_prefill + self.num_decode)
        ]
        for engine in self.engines:
            engine.down_reason = ""
        self.metrics = Metrics(self.engines, self.connector)

    def page(self) -> Page:
        return parse_page(self.metrics.page())

    def serve(
        self,
        count: int,
        *,
        ttft_s: float,
        gap_s: float,
        isl: int = 1000,
        osl: int = 11,
        prefill_s: float = 0.1,
    ) -> None:
        """Requests that have come and ended."""
        metrics = self.metrics
        for at in range(count):
            metrics.requests.add("/v1/completions", "200")
            metrics.ttft_s.observe(ttft_s)
            metrics.prefill_s.observe(prefill_s)
            metrics.first_gap_s.observe(gap_s)
            for _ in range(osl - 1):
                metrics.itl_s.observe(gap_s)
            metrics.tpot_s.observe(gap_s)
            metrics.e2el_s.observe(ttft_s + gap_s * (osl - 1))
            metrics.prompt_tokens.observe(isl)
            metrics.output_tokens.observe(osl)
            prefill = self.engines[at % self.num_prefill]
            decode = self.engines[self.num_prefill + at % self.num_decode]
            prefill.work.busy_s += prefill_s
            prefill.work.request_s += prefill_s
            decode.work.busy_s += ttft_s
            decode.work.request_s += ttft_s + gap_s * (osl - 1)

    def seen(self, earlier: Page) -> Observation:
        return observe(earlier, self.page(), INTERVAL_S)


def served(count: int, **how: float) -> Observation:
    """An interval of a proxy of one prefill and one decode engine."""
    proxied = Proxied()
    earlier = proxied.page()
    proxied.serve(count, **how)  # type: ignore[arg-type]
    return proxied.seen(earlier)


def vllm_histogram(name: str, bounds: Iterable[float], values: Mapping[float, int]) -> str:
    """A histogram as vLLM's client library writes it; ``values``: value to how often."""
    labels = 'engine="0",model_name="m"'
    lines = [f"# HELP vllm:{name} Histogram.", f"# TYPE vllm:{name} histogram"]
    for bound in (*bounds, math.inf):
        count = sum(number for value, number in values.items() if value <= bound)
        le = "+Inf" if math.isinf(bound) else f"{bound}"
        lines.append(f'vllm:{name}_bucket{{{labels},le="{le}"}} {float(count)}')
    lines.append(f"vllm:{name}_count{{{labels}}} {float(sum(values.values()))}")
    total = sum(value * number for value, number in values.items())
    lines.append(f"vllm:{name}_sum{{{labels}}} {total}")
    lines.append(f"vllm:{name}_created{{{labels}}} 1.7e+09")
    return "\n".join(lines) + "\n"


def vllm_page(
    count: int,
    *,
    ttft_s: float = 0.04,
    gaps_s: Mapping[float, int] | None = None,
    queue_s: float = 0.0,
    prefill_s: float = 0.03,
    running: int = 0,
    engines: int = 1,
    without: str = "",
) -> str:
    """What an engine counts of so many requests of 1000 tokens in and 11 out."""
    gaps_s = {0.008: 10 * count} if gaps_s is None else gaps_s
    text = "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1.79e+09\n"
    for at in range(engines):
        text += f'vllm:num_requests_running{{engine="{at}"}} {running}.0\n'
    text += 'vllm:num_requests_waiting{engine="0"} 0.0\n'
    text += f'vllm:request_success_total{{engine="0",finished_reason="length"}} {count}.0\n'
    for name, bounds, values in (
        ("time_to_first_token_seconds", (0.02, 0.04, 0.06, 0.1, 0.5, 1.0), {ttft_s: count}),
        ("inter_token_latency_seconds", VLLM_GAPS_S, gaps_s),
        ("request_time_per_output_token_seconds", VLLM_GAPS_S, {0.008: count}),
        ("e2e_request_latency_seconds", (0.3, 0.5, 1.0, 5.0), {ttft_s + 0.08: count}),
        ("request_prompt_tokens", (1.0, 1000.0, 5000.0), {1000.0: count}),
        ("request_generation_tokens", (1.0, 10.0, 100.0), {11.0: count}),
        ("request_prefill_time_seconds", (0.3, 0.5), {prefill_s: count}),
        ("request_queue_time_seconds", (0.3, 0.5), {queue_s: count}),
    ):
        if name != without:
            text += vllm_histogram(name, bounds, values)
    return text
