"""What the connector counts, in vLLM's statistics: its log line and its Prometheus metrics."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

_COUNTERS = {
    "sent_bytes": "Bytes of KV written to decode engines.",
    "received_bytes": "Bytes of KV received from prefill engines.",
    "num_sends": "Requests sent, once a rank.",
    "num_receives": "Requests received, once a rank.",
    "num_failed_sends": "Requests that were not sent.",
    "num_failed_receives": "Requests that were not received, and were recomputed or failed.",
    "num_retries": "Transfers that began anew, because a prefill was preempted.",
}
_HISTOGRAMS = {
    "send_s": "From a request's first chunk until all of it was at the decoder.",
    "receive_s": "From a request's blocks until all of its KV was there.",
}
_GAUGE = "num_quarantined_blocks"
_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class KvxferStats(KVConnectorStats):  # type: ignore[misc]
    """Sums and samples of an interval, as `Counters.take` gives them."""

    def reset(self) -> None:
        """Forget them."""
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "KvxferStats":
        """Add what another rank, or a later interval, counted."""
        for name, value in other.data.items():
            mine = self.data.get(name)
            self.data[name] = value if mine is None else mine + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """One figure each, for the log; GB/s are of bytes over the whole hand-over."""
        short: dict[str, int | float] = {}
        for name, value in self.data.items():
            if isinstance(value, list):
                short[f"{name[:-2]}_mean_ms"] = round(1e3 * sum(value) / max(len(value), 1), 3)
            else:
                short[name] = value
        for way in ("send", "receive"):
            total_s = sum(self.data.get(f"{way}_s", ()))
            moved = self.data.get("sent_bytes" if way == "send" else "received_bytes", 0)
            if total_s:
                short[f"{way}_gb_per_s"] = round(moved / total_s / 1e9, 3)
        return short


class KvxferPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same as Prometheus metrics, ``kvxfer:...``, one set an engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Called by vLLM."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: self._each(self._counter_cls, f"kvxfer:{name}", text)
            for name, text in _COUNTERS.items()
        }
        self._metrics |= {
            name: self._each(self._histogram_cls, f"kvxfer:{name}", text, buckets=_BUCKETS_S)
            for name, text in _HISTOGRAMS.items()
        }
        text = "Blocks that a writer may still write to."
        self._metrics[_GAUGE] = self._each(self._gauge_cls, f"kvxfer:{_GAUGE}", text)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval."""
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name][engine_idx]
            if name == _GAUGE:
                metric.set(value)
            elif isinstance(value, list):
                for one in value:
                    metric.observe(one)
            else:
                metric.inc(value)

    def _each(self, kind: Any, name: str, text: str, **options: Any) -> dict[int, Any]:
        """The metric of each engine."""
        metric = kind(name=name, documentation=text, labelnames=self._labelnames, **options)
        return {
            engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()
        }
