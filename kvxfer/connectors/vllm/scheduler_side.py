"""The connector in vLLM's scheduler: vLLM's requests and steps, told to the two trackers.

What is used of vLLM's objects are attributes alone; nothing here imports it.
"""

import logging
from collections.abc import Sequence
from typing import Any

from kvxfer.connectors.vllm.params import ReceiveParams, SendParams, read_params
from kvxfer.connectors.vllm.receive_tracker import ReceiveTracker
from kvxfer.connectors.vllm.send_tracker import SendTracker
from kvxfer.connectors.vllm.step import StepPlan, Table
from kvxfer.errors import InvalidUsage

_log = logging.getLogger(__name__)
# vLLM ends a request by one of these, or because it is aborted, ignored or in error.
_NORMAL_ENDS = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


class SchedulerSide:
    """Decides by what the scheduler says; waits for nothing and asks nobody."""

    def __init__(self, block_sizes: Sequence[int], *, is_producer: bool, is_consumer: bool) -> None:
        """Of an engine whose groups of layers have blocks of so many tokens."""
        self._block_sizes = tuple(block_sizes)
        self._is_producer = is_producer
        self._is_consumer = is_consumer
        self._receives = ReceiveTracker()
        self._sends = SendTracker(block_sizes)

    def num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that come from a prefill engine, and whether they come between steps."""
        params = self._params(request)
        if not isinstance(params, ReceiveParams) or not self._may_receive(request):
            return 0, False
        number = self._receives.num_to_receive(
            request.request_id, params.transfer_id, request.num_prompt_tokens, num_computed_tokens
        )
        return number, bool(number)

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request has blocks; again once its KV has come, or after a preemption."""
        params = self._params(request, explain=True)
        num_prompt_tokens = request.num_prompt_tokens
        if isinstance(params, SendParams) and self._is_producer:
            self._sends.admit(request.request_id, params, num_prompt_tokens)
        elif isinstance(params, ReceiveParams) and self._is_consumer:
            end = num_prompt_tokens - 1
            tables = tuple(
                Table.covering(ids, size, (end - num_external_tokens, end)).without_left(size)
                for ids, size in zip(blocks.get_block_ids(), self._block_sizes, strict=True)
            )
            self._receives.place(
                request.request_id,
                params.transfer_id,
                num_prompt_tokens,
                num_external_tokens,
                tables,
            )

    def build_plan(self, output: Any) -> StepPlan:
        """What the workers are to do at the step that vLLM has just put together."""
        plan = StepPlan()
        self._receives.take(plan)
        self._sends.preempted(output.preempted_req_ids or ())
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            self._sends.scheduled(
                new.req_id,
                new.block_ids,
                replaces=True,
                num_computed_tokens=new.num_computed_tokens,
                num_scheduled_tokens=scheduled[new.req_id],
            )
        cached = output.scheduled_cached_reqs
        for request_id, new_blocks, num_computed_tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self._sends.scheduled(
                request_id,
                new_blocks,
                replaces=request_id in cached.resumed_req_ids,
                num_computed_tokens=num_computed_tokens,
                num_scheduled_tokens=scheduled[request_id],
            )
        self._sends.take(plan)
        return plan

    def finished(self, request: Any) -> bool:
        """A request has ended in vLLM. Returns whether its blocks must stay until it was sent."""
        params = self._params(request)
        if isinstance(params, ReceiveParams):
            self._receives.finished(
                request.request_id, params.transfer_id, "the decoder's request has ended"
            )
        normally = request.status.name in _NORMAL_ENDS
        return self._sends.finished(request.request_id, normally=normally)

    def reported(self, output: Any) -> None:
        """What all workers have reported at a step."""
        self._receives.arrived(output.finished_recving or ())
        self._sends.sent(output.finished_sending or ())

    @property
    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping although it has no request to compute."""
        return self._sends.is_ending

    def _params(self, request: Any, *, explain: bool = False) -> SendParams | ReceiveParams | None:
        """A request's part in a hand-over; one that is not understood is computed like any other.

        The engine is not the place to refuse a request: an error here would end it for all.
        """
        try:
            return read_params(request.kv_transfer_params)
        except InvalidUsage as error:
            if explain:
                _log.error("request %s is not handed over: %s", request.request_id, error)
            return None

    def _may_receive(self, request: Any) -> bool:
        """Whether the KV of a prompt is all that a request needs of it."""
        if not self._is_consumer or getattr(request, "skip_reading_prefix_cache", False):
            return False
        sampling = request.sampling_params
        return sampling is not None and sampling.prompt_logprobs is None
