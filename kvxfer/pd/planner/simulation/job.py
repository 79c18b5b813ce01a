"""A request on its way through a simulation."""

from typing import TYPE_CHECKING

from kvxfer.pd.planner.trace import Request

if TYPE_CHECKING:
    from kvxfer.pd.planner.simulation.handover import Handover

Piece = float | tuple[int, int, int]
"""A gap of its own in seconds, or (engine, first, end): the gaps of runs of its timeline."""


class Job:
    """One request. Times in seconds; NaN until they are known."""

    __slots__ = (
        "arrived_s",
        "begin",
        "computed",
        "first_s",
        "handover",
        "held",
        "hit_tokens",
        "index",
        "is_long",
        "last_s",
        "last_step",
        "num_delivered",
        "pieces",
        "prefilled_s",
        "prompt",
        "remaining",
        "request",
        "sent_s",
        "started_s",
        "transfer_s",
    )

    def __init__(self, index: int, request: Request, sent_s: float, is_long: bool) -> None:
        """A request that was sent just now; nothing of it is computed."""
        nan = float("nan")
        self.index = index
        self.request = request
        self.is_long = is_long
        self.sent_s = sent_s
        self.prompt = request.num_prompt_tokens  # to be in the cache before the next token
        self.computed = 0  # of these, in the cache
        self.remaining = request.num_output_tokens
        self.held = 0  # tokens of KV memory on the engine where it is
        self.hit_tokens = 0
        self.num_delivered = 0
        self.begin = 0  # of its gaps in the engine's timeline
        self.last_step = -1  # the engine's step that gives its last token, while it decodes
        self.pieces: list[Piece] = []
        self.handover: Handover | None = None
        self.arrived_s = self.started_s = self.prefilled_s = nan
        self.first_s = self.last_s = nan
        self.transfer_s = 0.0

    def deliver(self, now_s: float) -> None:
        """A token that ends a gap of its own, or the first one."""
        if self.num_delivered:
            self.pieces.append(now_s - self.last_s)
        else:
            self.first_s = now_s
        self.num_delivered += 1
        self.remaining -= 1
        self.last_s = now_s
