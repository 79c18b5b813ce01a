"""The class that vLLM loads in place of ``LMCacheConnectorV1``; its settings are the same.

The only module here that imports vLLM.
"""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvxfer.connectors.lmcache.awaited import Awaited, num_receivers
from kvxfer.connectors.lmcache.install import install
from kvxfer.connectors.lmcache.options import read_options
from kvxfer.connectors.vllm.params import ReceiveParams, read_params
from kvxfer.errors import InvalidUsage, KvxferError

# Before LMCache's modules make anything of their own.
install(upgrade=True)

from lmcache.integration.vllm.lmcache_connector_v1 import LMCacheConnectorV1Dynamic  # noqa: E402
from lmcache.integration.vllm.utils import mla_enabled  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1 import base  # noqa: E402

from kvxfer.connectors.lmcache.pd_common import arrivals_of  # noqa: E402

_log = logging.getLogger(__name__)
# How a worker tells its scheduler something; older releases of vLLM have no such thing.
_FROM_WORKERS: Any = getattr(base, "KVConnectorWorkerMetadata", None)
_GUARDED = "_kvxfer_guarded"


@dataclass
class EndedAtRanks(_FROM_WORKERS or object):  # type: ignore[misc]
    """What ranks tell the scheduler with the output of a step; see `Awaited.note`."""

    arrived: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    is_deaf: bool = False  # nothing arrives at one: LMCache has not started there

    def aggregate(self, other: "EndedAtRanks") -> "EndedAtRanks":
        """This and what another rank tells."""
        return EndedAtRanks(
            self.arrived + other.arrived, self.lost + other.lost, self.is_deaf or other.is_deaf
        )


class KvxferLMCacheConnector(LMCacheConnectorV1Dynamic):  # type: ignore[misc]
    """LMCache's connector, whose PD and P2P transfers use kvxfer's channel.

    ``transfer_channel: nixl`` means kvxfer here, so that a configuration stays as it is. A decode
    leg that names its transfer waits here until its KV has arrived.
    """

    # In the scheduler.

    @functools.cached_property
    def _awaited(self) -> Awaited | None:
        if _FROM_WORKERS is None:
            _log.warning(
                "requests do not wait for their KV: this vLLM's workers cannot announce it"
            )
            return None
        extra = self._lmcache_engine.config.extra_config
        return Awaited(self._num_receivers, read_options(extra).receive_timeout_s)

    @functools.cached_property
    def _num_receivers(self) -> int:
        return num_receivers(
            self._lmcache_engine.config,
            world_size=self._vllm_config.parallel_config.world_size,
            is_mla=mla_enabled(self._vllm_config.model_config),
        )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded; None as long as they are on their way."""
        transfer_id = _transfer_of(request)
        if transfer_id is None:
            return self._look_up(request, num_computed_tokens)
        if self._awaited and not self._awaited.is_over(request.request_id, transfer_id):
            return None, False
        with _all_tokens(self._lmcache_engine):
            return self._look_up(request, num_computed_tokens)

    def _look_up(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return found

    def update_connector_output(self, connector_output: Any) -> None:
        """Take what the ranks tell."""
        told = getattr(connector_output, "kv_connector_worker_meta", None)
        if self._awaited and isinstance(told, EndedAtRanks):
            self._awaited.note(told.arrived, told.lost)
            if told.is_deaf:
                self._awaited.stop()
        super().update_connector_output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As LMCache does; nobody waits for it any more."""
        if self._awaited:
            self._awaited.forget(request.request_id)
        ended: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return ended

    # In a worker.

    def build_connector_worker_meta(self) -> EndedAtRanks | None:
        """What is over at this rank since the last step."""
        engine = self._lmcache_engine.lmcache_engine
        if engine is None:
            is_receiver = self._vllm_config.parallel_config.rank < self._num_receivers
            return EndedAtRanks(is_deaf=True) if is_receiver else None
        arrivals = arrivals_of(engine)
        ended = None if arrivals is None else arrivals.take_ended()
        return EndedAtRanks(*ended) if ended and any(ended) else None

    def wait_for_save(self) -> None:
        """Hand over what the step computed.

        A request whose receiver is gone is lost alone: LMCache lets the error out into vLLM's
        worker, which ends the engine.
        """
        engine = self._lmcache_engine.lmcache_engine
        if engine is not None and not hasattr(engine, _GUARDED):
            engine.store = functools.partial(_store, engine.store)
            setattr(engine, _GUARDED, True)
        super().wait_for_save()


def _store(store: Any, *args: Any, **kwargs: Any) -> None:
    try:
        store(*args, **kwargs)
    except KvxferError as error:
        _log.error("request %s is not handed over: %s", kwargs.get("req_id", ""), error)


def _transfer_of(request: Any) -> str | None:
    """The transfer that a request waits for; None where it waits for none."""
    try:
        params = read_params(getattr(request, "kv_transfer_params", None))
    except InvalidUsage as error:
        _log.warning("request %s is not waited for: %s", request.request_id, error)
        return None
    return params.transfer_id if isinstance(params, ReceiveParams) else None


@contextmanager
def _all_tokens(adapter: Any) -> Iterator[None]:
    """A block in which LMCache looks all tokens of a prompt up: it has no token of the prefill's,
    for which ``skip_last_n_tokens`` makes room."""
    skipped, adapter.skip_last_n_tokens = adapter.skip_last_n_tokens, 0
    try:
        yield
    finally:
        adapter.skip_last_n_tokens = skipped
