"""The prefill side in the scheduler: which tokens of which requests each step makes ready."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvxfer.connectors.vllm.params import SendParams
from kvxfer.connectors.vllm.step import Part, SendStart, StepPlan, Table


@dataclass(slots=True)
class _Outgoing:
    """A request that is to be sent.

    Attributes:
        num_tokens: to be sent: all of the prompt but the last.
        attempt: number of the present attempt; 0 = none has begun.
        num_ready: tokens that earlier steps of this attempt made ready.
        blocks: its block ids so far, of each group of layers.
    """

    params: SendParams
    num_tokens: int
    attempt: int = 0
    num_ready: int = 0
    blocks: list[list[int]] = field(default_factory=list)


class SendTracker:
    """Requests of one prefill engine."""

    def __init__(self, block_sizes: Sequence[int]) -> None:
        """For groups of layers with blocks of so many tokens."""
        self._block_sizes = tuple(block_sizes)
        self._outgoing: dict[str, _Outgoing] = {}
        self._ending: set[str] = set()
        self._plan = StepPlan()

    def admit(self, request_id: str, params: SendParams, num_prompt_tokens: int) -> None:
        """The scheduler has given a request blocks; again after a preemption: no change.

        Of a prompt of one token nothing is sent.
        """
        if num_prompt_tokens > 1 and request_id not in self._outgoing:
            self._outgoing[request_id] = _Outgoing(params, num_prompt_tokens - 1)

    def preempted(self, request_ids: Collection[str]) -> None:
        """These requests have lost their blocks; what was sent of them is void.

        The next attempt begins at once, so that the decoder knows of it when the present one ends.
        """
        for request_id in request_ids:
            found = self._outgoing.get(request_id)
            if found is not None and found.attempt:
                self._begin(request_id, found)

    def scheduled(
        self,
        request_id: str,
        new_blocks: Sequence[Sequence[int]] | None,
        *,
        replaces: bool,
        num_computed_tokens: int,
        num_scheduled_tokens: int,
    ) -> None:
        """A request runs in the coming step.

        Args:
            request_id: which.
            new_blocks: block ids of each group of layers, after those it has.
            replaces: they are all that it has.
            num_computed_tokens: tokens before this step, those found in the prefix cache included.
            num_scheduled_tokens: tokens of this step.
        """
        found = self._outgoing.get(request_id)
        if found is None:
            return
        if replaces:
            found.blocks = [[] for _ in self._block_sizes]
        if not found.attempt or (replaces and found.num_ready):
            self._begin(request_id, found)
        for blocks, more in zip(found.blocks, new_blocks or (), strict=bool(new_blocks)):
            blocks.extend(more)
        end = min(num_computed_tokens + num_scheduled_tokens, found.num_tokens)
        if end > found.num_ready:
            tokens = (found.num_ready, end)
            tables = tuple(
                Table.covering(blocks, size, tokens)
                for blocks, size in zip(found.blocks, self._block_sizes, strict=True)
            )
            self._plan.parts.append(Part(request_id, tokens, tables, end == found.num_tokens))
            found.num_ready = end

    def finished(self, request_id: str, *, normally: bool) -> bool:
        """A request has ended in vLLM. Returns whether its blocks must stay until it was sent."""
        found = self._outgoing.pop(request_id, None)
        if found is None or not found.attempt:
            return False
        if not normally or found.num_ready < found.num_tokens:
            self._plan.cancelled.append(request_id)
        self._ending.add(request_id)
        return True

    def sent(self, request_ids: Collection[str]) -> None:
        """All ranks are done with these requests, well or not."""
        self._ending.difference_update(request_ids)

    @property
    def is_ending(self) -> bool:
        """Whether requests that vLLM has ended are still being sent."""
        return bool(self._ending)

    def take(self, plan: StepPlan) -> None:
        """Move what the coming step does into ``plan``."""
        mine, self._plan = self._plan, StepPlan()
        plan.starts, plan.parts, plan.cancelled = mine.starts, mine.parts, mine.cancelled

    def _begin(self, request_id: str, found: _Outgoing) -> None:
        found.attempt += 1
        found.num_ready = 0
        params = found.params
        self._plan.starts.append(
            SendStart(
                request_id, params.transfer_id, found.attempt, params.receivers, found.num_tokens
            )
        )
