"""What two readings of a server's metrics say of the time between them.

Names of the proxy are of `kvxfer.pd.proxy.metrics`, those of vLLM of its ``v1/metrics/loggers.py``
(0.25 to 0.32; https://docs.vllm.ai/en/latest/usage/metrics.html).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from kvxfer.errors import NotAvailable
from kvxfer.pd.advise.buckets import Buckets, buckets_between
from kvxfer.pd.advise.page import Page

Kind: TypeAlias = Literal["pd", "aggregated"]

_PROXY: Final = "kvxfer_proxy_"
_PROXY_NAMES: Final = {
    "ttft": "kvxfer_proxy_time_to_first_token_seconds",
    "first_gap": "kvxfer_proxy_first_gap_seconds",
    "itl": "kvxfer_proxy_inter_token_latency_seconds",
    "tpot": "kvxfer_proxy_time_per_output_token_seconds",
    "e2el": "kvxfer_proxy_e2e_latency_seconds",
    "prompt": "kvxfer_proxy_prompt_tokens",
    "output": "kvxfer_proxy_output_tokens",
    "prefill": "kvxfer_proxy_prefill_seconds",
}
_VLLM_NAMES: Final = {
    "ttft": "vllm:time_to_first_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "tpot": "vllm:request_time_per_output_token_seconds",
    "e2el": "vllm:e2e_request_latency_seconds",
    "prompt": "vllm:request_prompt_tokens",
    "output": "vllm:request_generation_tokens",
    "prefill": "vllm:request_prefill_time_seconds",
    "queue": "vllm:request_queue_time_seconds",
}


@dataclass(frozen=True, slots=True)
class Stage:
    """Engines of one role.

    Args:
        role: ``prefill``, ``decode``, or ``engine`` where one does both.
        num_engines: that take requests.
        num_down: that do not.
        busy: mean share of the time with work of that role, 0 to 1; None: not known.
        in_flight: requests in that stage at a time, the mean over the interval, of all engines.
    """

    role: Literal["prefill", "decode", "engine"]
    num_engines: int
    num_down: int
    busy: float | None
    in_flight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """An interval of a server.

    Args:
        kind: ``pd`` for a proxy, ``aggregated`` for vLLM.
        connector: that moves KV; empty where the server does not say.
        seconds: between the two readings.
        requests_per_s: that came; those which came and have not ended included.
        in_flight: requests at a time, the mean.
        prompt_tokens, output_tokens: means of those that ended; NaN of none.
        num_failed: that ended with a status of 500 or above, or (vLLM) aborted or in an error.
        stages: the engines.
        histograms: seconds by key, and tokens; None: not measured by that server.
        remarks: what a reader has to know of these figures.
    """

    kind: Kind
    connector: str
    seconds: float
    requests_per_s: float
    in_flight: float
    prompt_tokens: float
    output_tokens: float
    num_failed: int
    stages: tuple[Stage, ...]
    histograms: Mapping[str, Buckets | None]
    remarks: tuple[str, ...] = ()

    @property
    def is_idle(self) -> bool:
        """Whether no request came, and none was there."""
        return self.requests_per_s <= 0 and self.in_flight <= 0

    def stage(self, role: str) -> Stage | None:
        """The engines of a role; None where the set-up has no such."""
        return next((one for one in self.stages if one.role == role), None)


def observe(earlier: Page, later: Page, seconds: float) -> Observation:
    """Difference two readings of one process, so many seconds apart.

    Raises:
        NotAvailable: the page is neither the proxy's nor vLLM's.
        ProtocolMismatch: a histogram contradicts itself.
    """
    if any(name.startswith(_PROXY) for name in later.samples):
        return _of_proxy(earlier, later, seconds)
    if any(name.startswith("vllm:") for name in later.samples):
        return _of_vllm(earlier, later, seconds)
    raise NotAvailable(
        "the page of metrics is neither of kvxfer's proxy nor of vLLM (no kvxfer_proxy_ or vllm: "
        "in it); give the URL of one of these"
    )


def _of_proxy(earlier: Page, later: Page, seconds: float) -> Observation:
    histograms = _histograms(earlier, later, _PROXY_NAMES)
    running = _grown(earlier, later, "kvxfer_proxy_requests_running")
    ended = _grown(earlier, later, "kvxfer_proxy_requests_total")

    def rate(name: str, role: str) -> float:
        full = f"kvxfer_proxy_engine_{name}_seconds_total"
        return _grown(earlier, later, full, role=role) / seconds

    in_prefill, in_flight = (rate("request", role) for role in ("prefill", "decode"))
    stages = []
    for role, count in (("prefill", in_prefill), ("decode", max(0.0, in_flight - in_prefill))):
        up = [value > 0 for _, value in later.of("kvxfer_proxy_engine_up", role=role)]
        busy = rate("busy", role) / max(1, sum(up))
        stages.append(
            Stage(
                "prefill" if role == "prefill" else "decode",
                sum(up),
                len(up) - sum(up),
                min(1.0, busy),
                count,
            )
        )
    info = [labels.get("connector", "") for labels, _ in later.of("kvxfer_proxy_info")]
    failed = sum(
        value - earlier.total("kvxfer_proxy_requests_total", **labels)
        for labels, value in later.of("kvxfer_proxy_requests_total")
        if labels.get("status", "").startswith("5")
    )
    estimated = _grown(earlier, later, "kvxfer_proxy_prompts_estimated_total")
    whole = _count(histograms["e2el"]) - _count(histograms["output"])
    remarks = []
    if estimated:
        remarks.append(f"{estimated:.0f} prompts' tokens are estimated from their bytes")
    if whole > 0:
        remarks.append(f"{whole:.0f} answers were not streamed: no TTFT, gaps and length of them")
    return Observation(
        kind="pd",
        connector=info[0] if info else "",
        seconds=seconds,
        requests_per_s=max(0.0, ended + running) / seconds,
        in_flight=in_flight,
        prompt_tokens=_mean(histograms["prompt"]),
        output_tokens=_mean(histograms["output"]),
        num_failed=round(failed),
        stages=tuple(stages),
        histograms=histograms,
        remarks=tuple(remarks),
    )


def _of_vllm(earlier: Page, later: Page, seconds: float) -> Observation:
    histograms = _histograms(earlier, later, _VLLM_NAMES)
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    before, now = (sum(page.total(name) for name in gauges) for page in (earlier, later))
    ended = _grown(earlier, later, "vllm:request_success_total")
    num_engines = len({labels.get("engine", "0") for labels, _ in later.of(gauges[0])}) or 1
    e2el = histograms["e2el"]
    # Little's law, over requests that ended; where none did, what both readings saw.
    in_flight = e2el.total / seconds if e2el is not None and e2el.count else (before + now) / 2
    prefill = histograms["prefill"]
    in_prefill = prefill.total / seconds if prefill is not None else 0.0
    busy = None if prefill is None else min(1.0, in_prefill / num_engines)
    preempted = _grown(earlier, later, "vllm:num_preemptions_total")
    remarks = [f"{preempted:.0f} preemptions: KV memory ran out"] if preempted else []
    failed = sum(
        _grown(earlier, later, "vllm:request_success_total", finished_reason=reason)
        for reason in ("abort", "error")
    )
    return Observation(
        kind="aggregated",
        connector="",
        seconds=seconds,
        requests_per_s=max(0.0, ended + now - before) / seconds,
        in_flight=in_flight,
        prompt_tokens=_mean(histograms["prompt"]),
        output_tokens=_mean(histograms["output"]),
        num_failed=round(failed),
        stages=(Stage("engine", num_engines, 0, busy, in_flight),),
        histograms=histograms,
        remarks=tuple(remarks),
    )


def _histograms(earlier: Page, later: Page, names: Mapping[str, str]) -> dict[str, Buckets | None]:
    return {key: buckets_between(earlier, later, name) for key, name in names.items()}


def _grown(earlier: Page, later: Page, name: str, **labels: str) -> float:
    return later.total(name, **labels) - earlier.total(name, **labels)


def _mean(buckets: Buckets | None) -> float:
    return math.nan if buckets is None else buckets.mean


def _count(buckets: Buckets | None) -> float:
    return 0.0 if buckets is None else buckets.count
