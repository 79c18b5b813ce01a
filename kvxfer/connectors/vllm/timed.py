"""Any connector of vLLM, with a note of when each of its hooks had its turn.

``kv_connector_module_path: kvxfer.connectors.vllm.timed``, and as ``kv_connector`` the name of
another one: as vLLM has it registered, or ``MODULE:CLASS``. What is loaded is a subclass of that
connector, so that all else is the connector's own, in every release: its answers and settings,
class-level hooks, properties, interfaces that it supports. ``KVXFER_TIMINGS`` names the file.
"""

import functools
import inspect
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from kvxfer.connectors.vllm.cpu_event import stand_in
from kvxfer.connectors.vllm.timings import Timings
from kvxfer.env import timings_file
from kvxfer.errors import InvalidUsage

_FACTORY: Final = "vllm.distributed.kv_transfer.kv_connector.factory"
_NEEDED: Final = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "wait_for_save",
    "get_finished",
    "on_new_request",
)
_ARGUMENTS: Final = ("vllm_config", "role", "kv_cache_config")
_LOADS: Final = "kvxfer_loads"
"""Set on what a scheduler sends to its workers: requests to load, and whether between steps."""

if TYPE_CHECKING:
    _Inner = Any
else:
    _Inner = object


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # Python's own, not a connector
        raise AttributeError(name)
    stand_in()
    module, colon, own = name.rpartition(":")
    if colon:
        return timed(getattr(import_module(module), own))
    registered = import_module(_FACTORY).KVConnectorFactory
    return timed(registered.get_connector_class_by_name(name))


@functools.cache
def timed(inner: type) -> type:
    """A subclass of a connector that notes times; of each connector one.

    Raises:
        InvalidUsage: it lacks a hook, or is not made with vLLM's three arguments.
    """
    taken = inspect.signature(inner).parameters
    missing = [
        *(name for name in _NEEDED if not callable(getattr(inner, name, None))),
        *(f"argument {name}" for name in _ARGUMENTS if name not in taken),
    ]
    if missing:
        raise InvalidUsage(
            f"the connector {inner.__module__}.{inner.__qualname__} cannot be timed: it has no "
            f"{', '.join(missing)}"
        )
    # From vLLM 0.30 on an engine asks for results, where a connector may have its own answer.
    notes = _TimedResults if hasattr(inner, "get_transfer_results") else _Timed
    return type(inner.__name__, (notes, inner), {"__module__": __name__, "__doc__": inner.__doc__})


class _Timed(_Inner):  # type: ignore[misc]
    """The notes; goes before a connector in the order of its bases."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        self._kvxfer_timings = Timings(timings_file())
        self._kvxfer_found: dict[str, bool] = {}  # in the scheduler: not placed yet
        self._kvxfer_loads: dict[str, bool] = {}  # to be sent to workers; there: of this step
        self._kvxfer_waited_s = 0.0
        super().__init__(vllm_config, role, kv_cache_config)
        if getattr(role, "name", "") == "SCHEDULER":
            self._kvxfer_timings.note("cache", token_bytes=token_bytes(kv_cache_config))

    # In the scheduler.

    def on_new_request(self, request: Any) -> None:
        self._kvxfer_timings.note("arrived", request.request_id)
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._kvxfer_timings.note("asked", request.request_id)
        number, between_steps = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if number is not None:
            self._kvxfer_timings.note("answered", request.request_id, num_tokens=number)
            self._kvxfer_found[request.request_id] = between_steps
        return number, between_steps

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        between_steps = self._kvxfer_found.pop(request.request_id, False)
        if num_external_tokens:
            self._kvxfer_timings.note("placed", request.request_id)
            self._kvxfer_loads[request.request_id] = between_steps
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        for request_id in scheduler_output.num_scheduled_tokens:
            self._kvxfer_timings.note("scheduled", request_id)
        for request_id in scheduler_output.finished_req_ids:
            self._kvxfer_timings.forget(request_id)
            self._kvxfer_found.pop(request_id, None)
        metadata = super().build_connector_meta(scheduler_output)
        with suppress(AttributeError, TypeError):  # without a place for it, loads have no begin
            setattr(metadata, _LOADS, self._kvxfer_loads)
        self._kvxfer_loads = {}
        return metadata

    # In a worker.

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        loads: Mapping[str, bool] = getattr(connector_metadata, _LOADS, {})
        for request_id in loads:
            self._kvxfer_timings.note("begun", request_id)
        self._kvxfer_loads = dict(loads)
        super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        for request_id in self._kvxfer_in_step():
            self._kvxfer_timings.note("loaded", request_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        began_s = time.monotonic()
        super().wait_for_layer_load(layer_name)
        self._kvxfer_waited_s += time.monotonic() - began_s

    def wait_for_save(self) -> None:
        for request_id in self._kvxfer_in_step():
            self._kvxfer_timings.note("waited", request_id, seconds=self._kvxfer_waited_s)
        self._kvxfer_waited_s = 0.0
        super().wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = super().get_finished(finished_req_ids)
        self._kvxfer_ended(received, finished_req_ids)
        return sent, received

    def _kvxfer_ended(self, received: Iterable[str] | None, finished: Iterable[str]) -> None:
        for request_id in received or ():
            self._kvxfer_timings.note("loaded", request_id)
        for request_id in finished:
            self._kvxfer_timings.forget(request_id)

    def _kvxfer_in_step(self) -> list[str]:
        """Requests whose KV is loaded in the step that uses it."""
        return [name for name, between_steps in self._kvxfer_loads.items() if not between_steps]


class _TimedResults(_Timed):
    """Of a connector that has all results of a step in one answer."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        self._kvxfer_ended(results.finished_recving, finished_req_ids)
        return results


def token_bytes(kv_cache_config: Any) -> int:
    """Bytes of KV of one token in one rank, all layers; 0 where vLLM does not say.

    Of layers with a window it is what a token takes while it is inside.
    """
    total = 0
    for group in getattr(kv_cache_config, "kv_cache_groups", None) or ():
        spec = group.kv_cache_spec
        # A spec of several kinds of layers has the pages of all of them together.
        num_pages = 1 if hasattr(spec, "kv_cache_specs") else len(group.layer_names)
        total += int(spec.page_size_bytes) * num_pages // int(spec.block_size)
    return total
