"""The class that vLLM loads: its hooks, each handed to the side that it concerns.

The only module here that imports vLLM, with `stats`.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvxfer.connectors.vllm.cache_map import map_caches
from kvxfer.connectors.vllm.config import read_config
from kvxfer.connectors.vllm.interface import require_interface
from kvxfer.connectors.vllm.model_part import block_sizes, model_part
from kvxfer.connectors.vllm.scheduler_side import SchedulerSide
from kvxfer.connectors.vllm.stats import KvxferPromMetrics, KvxferStats
from kvxfer.connectors.vllm.step import StepPlan
from kvxfer.connectors.vllm.worker_side import WorkerSide
from kvxfer.transport import StreamMark

_NAMES_FAILED = hasattr(KVConnectorBase_V1, "get_transfer_results")


@dataclass
class KvxferMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What vLLM carries from its scheduler to its workers."""

    plan: StepPlan


class KvxferConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """KV from a prefill engine's cache into a decode engine's, while the prefill computes.

    vLLM makes one in its scheduler and one in each worker. Set up by ``--kv-transfer-config``; the
    keys of ``kv_connector_extra_config`` are those of `ConnectorConfig`.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Called by vLLM.

        Raises:
            NotAvailable: a vLLM whose connector interface is not known here.
            InvalidUsage: wrong settings, or a model with several kinds of layers.
        """
        require_interface(KVConnectorBase_V1, type(self), vllm.__version__)
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm_does()
        transfer = vllm_config.kv_transfer_config
        self._roles = {
            "is_producer": transfer.is_kv_producer,
            "is_consumer": transfer.is_kv_consumer,
        }
        self._config = read_config(
            transfer.kv_connector_extra_config, is_consumer=transfer.is_kv_consumer
        )
        if self._config.on_failure:
            # The scheduler reads its policy after it has made its connector.
            transfer.kv_load_failure_policy = self._config.on_failure
        self._block_sizes = block_sizes(kv_cache_config)
        self._failed_block_ids: set[int] = set()
        self._failed_requests: set[str] = set()
        self._worker: WorkerSide | None = None
        self._scheduler = SchedulerSide(self._block_sizes, **self._roles)

    # In the scheduler.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See `SchedulerSide`, as for all of the scheduler's hooks."""
        return self._scheduler.num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note where a request's KV goes, or that it is to be sent."""
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvxferMetadata:
        """What the workers are to do at this step."""
        return KvxferMetadata(self._scheduler.build_plan(scheduler_output))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a request that is still being sent."""
        return self._scheduler.finished(request), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, of a model with several groups of layers."""
        return self._scheduler.finished(request), None

    def update_connector_output(self, connector_output: Any) -> None:
        """Note what all ranks have done."""
        self._scheduler.reported(connector_output)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Groups of layers whose KV comes: all."""
        return tuple(range(len(self._block_sizes)))

    def has_pending_push_work(self) -> bool:
        """Keep an idle engine stepping until all is sent."""
        return self._scheduler.has_pending_push_work

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Map the caches and open this rank's channels."""
        part = model_part(self._vllm_config, self._kv_cache_config, kv_caches, self._block_sizes)
        # Block ids tell which request has failed in a model with one group of layers; with several
        # a connector must name it, which it can from vLLM 0.30 on.
        tells_failures = len(self._block_sizes) == 1 or _NAMES_FAILED
        self._worker = WorkerSide(
            self._config,
            map_caches(kv_caches, part),
            tells_failures=tells_failures,
            **self._roles,
        )

    def bind_connector_metadata(self, connector_metadata: KvxferMetadata) -> None:
        """Take up what the scheduler says, before the step runs."""
        super().bind_connector_metadata(connector_metadata)
        self._require_worker().begin_step(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: KV comes by itself, between steps."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs once all of its KV is here."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Send a layer of what this step computes."""
        worker = self._require_worker()
        if worker.wants_marks:
            worker.layer_ready(layer_name, self._mark())

    def wait_for_save(self) -> None:
        """Send what no layer's hook has; nothing waits here."""
        worker = self._require_worker()
        if worker.wants_marks:
            worker.end_step(self._mark())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests that were sent, and requests that were received or have failed."""
        worker = self._require_worker()
        sent = worker.take_sent(finished_req_ids)
        received = worker.take_received()
        for one in received:
            if len(self._block_sizes) == 1:
                self._failed_block_ids |= one.failed_block_ids
            elif one.is_failed:
                self._failed_requests.add(one.request_id)
        return sent or None, {one.request_id for one in received} or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The same, with the requests that have failed where block ids do not name them."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving, self._failed_requests = self._failed_requests, set()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of requests that have failed, at the step that says so."""
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def get_kv_connector_stats(self) -> KvxferStats | None:
        """What this rank has counted since the last call."""
        counted = {} if self._worker is None else self._worker.counters.take()
        return KvxferStats(data=counted) if counted else None

    def shutdown(self) -> None:
        """Fail what is open, and let go of the caches."""
        if self._worker is not None:
            self._worker.close()

    # Of the class.

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        """Whether layers are sent one by one, which a full graph would leave out."""
        return read_config(extra_config, is_consumer=False).sends_layerwise

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvxferStats:
        """Statistics that came from a worker."""
        return KvxferStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> KvxferPromMetrics:
        """Their counters in Prometheus."""
        return KvxferPromMetrics(*args, **kwargs)

    def _require_worker(self) -> WorkerSide:
        assert self._worker is not None, "vLLM registers the caches first"
        return self._worker

    def _mark(self) -> StreamMark | None:
        """What is queued on the compute stream now; None on a CPU, where it has been done."""
        device = self._require_worker().device
        if device < 0:
            return None
        import torch

        return StreamMark(device, torch.cuda.current_stream(device).cuda_stream)


def _log_as_vllm_does() -> None:
    ours, theirs = logging.getLogger("kvxfer"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(theirs.level)
