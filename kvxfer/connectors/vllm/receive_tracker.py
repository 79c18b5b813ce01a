"""The decode side in the scheduler: which requests wait for KV, and where it is to go."""

from collections import OrderedDict
from collections.abc import Iterable

from kvxfer.connectors.vllm.step import GivenUp, Placement, StepPlan, Table

_MAX_KEPT = 1 << 16


class ReceiveTracker:
    """Transfers of one decode engine. It asks nobody and waits for nothing.

    A transfer has one owner, the request that receives it. Other requests of its name (the children
    of one with n > 1) wait for that and then find the prompt in the prefix cache, or compute it.
    """

    def __init__(self) -> None:
        """Nothing is expected yet."""
        self._transfer_of: dict[str, str] = {}  # of owners, by request
        self._owner_of: dict[str, str] = {}  # the same, by transfer
        self._settled: OrderedDict[str, None] = OrderedDict()
        self._placements: list[Placement] = []
        self._given_up: list[GivenUp] = []

    def num_to_receive(
        self, request_id: str, transfer_id: str, num_prompt_tokens: int, num_computed_tokens: int
    ) -> int | None:
        """Tokens that come beyond those that are here; None = ask again, another request gets them.

        Asking changes nothing. The last token of a prompt is never among them: the decoder computes
        it, because it is from there that the first token is sampled.
        """
        if transfer_id in self._settled:
            return 0
        if self._owner_of.get(transfer_id, request_id) != request_id:
            return None
        return max(num_prompt_tokens - 1 - num_computed_tokens, 0)

    def place(
        self,
        request_id: str,
        transfer_id: str,
        num_prompt_tokens: int,
        num_external_tokens: int,
        tables: tuple[Table, ...],
    ) -> None:
        """The scheduler has allocated a request's blocks.

        Args:
            request_id: vLLM's.
            transfer_id: which transfer.
            num_prompt_tokens: tokens of its prompt.
            num_external_tokens: how many of them it waits for; 0 = it takes none.
            tables: where these go, one a group of layers.
        """
        if transfer_id in self._settled or transfer_id in self._owner_of:
            return  # blocks for what follows the prompt
        awaited = num_external_tokens > 0
        if awaited:
            self._owner_of[transfer_id] = request_id
            self._transfer_of[request_id] = transfer_id
        else:
            self._settle(transfer_id)
        if num_prompt_tokens > 1:  # of a prompt of one token nothing is sent
            self._placements.append(
                Placement(
                    request_id,
                    transfer_id,
                    num_prompt_tokens - 1,
                    tables if awaited else (),
                    awaited,
                )
            )

    def arrived(self, request_ids: Iterable[str]) -> None:
        """All ranks have reported the end of these requests' transfers, well or not."""
        for request_id in request_ids:
            transfer_id = self._transfer_of.pop(request_id, None)
            if transfer_id is not None:
                del self._owner_of[transfer_id]
                self._settle(transfer_id)

    def finished(self, request_id: str, transfer_id: str, reason: str) -> None:
        """A request has ended in vLLM; if its KV has not come yet, it is not wanted any more."""
        owner = self._owner_of.get(transfer_id)
        if transfer_id in self._settled or owner not in (None, request_id):
            return
        self._given_up.append(GivenUp(transfer_id, reason))
        if owner is None:
            self._settle(transfer_id)  # it never had blocks, so no rank will report it

    def take(self, plan: StepPlan) -> None:
        """Move what has happened since the last step into ``plan``."""
        plan.placements, self._placements = self._placements, []
        plan.given_up, self._given_up = self._given_up, []

    def _settle(self, transfer_id: str) -> None:
        self._settled[transfer_id] = None
        if len(self._settled) > _MAX_KEPT:
            self._settled.popitem(last=False)
