"""Where the time to a first token goes, of one request, from what its connector wrote.

The client, the scheduler and the workers are on one host and read one clock, so that the parts
follow each other without a gap, and their sum is the client's TTFT:

    sent - arrived       to the scheduler: HTTP, checks, the way to the engine's process
    arrived - asked      waiting
    asked - answered     lookup
    answered - begun     placement: blocks are found, and the workers are told
    begun - loaded       transfer, and with it whatever puts KV where it belongs
    loaded - scheduled   waiting
    scheduled - token    first step: what is left of the prompt is computed, the token comes back

A connector that loads inside the step comes to ``scheduled`` before ``begun``; nothing waits then.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Final

import msgspec

from kvxfer.connectors.vllm.timings import Event

LOADING: Final = ("lookup", "placement", "transfer", "waiting")
"""Parts that a request without a store would not have, but for a little waiting."""
_OF_LOADS: Final = ("placed", "begun", "loaded")


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of each part, in the order of time but for ``waiting``, which comes twice."""

    arrival_s: float
    lookup_s: float
    placement_s: float
    transfer_s: float
    waiting_s: float
    first_step_s: float

    @property
    def loading_s(self) -> float:
        """All that has to do with KV that comes."""
        return self.lookup_s + self.placement_s + self.transfer_s + self.waiting_s


NAMES: Final = ("to the scheduler", "lookup", "placement", "transfer", "waiting", "first step")
FIELDS: Final = Parts.__struct_fields__
assert len(NAMES) == len(FIELDS)


def parts_of(events: Iterable[Event], sent_s: float, ttft_s: float) -> Parts | str:
    """The parts, or in words why there are none.

    Args:
        events: of one request, of all processes.
        sent_s: when the client sent it, on the events' clock.
        ttft_s: as the client measured it.
    """
    times: dict[str, list[float]] = {}
    waited_s, num_tokens = 0.0, 0
    for event in events:
        times.setdefault(event.what, []).append(event.at_s)
        waited_s = max(waited_s, event.seconds)
        num_tokens = max(num_tokens, event.num_tokens)
    needed = ("arrived", "asked", "answered", "scheduled")
    missing = [name for name in (*needed, *(_OF_LOADS if num_tokens else ())) if name not in times]
    if missing:
        return f"nobody noted {', '.join(missing)}"
    at = {name: min(found) for name, found in times.items()}
    if num_tokens:
        at["loaded"] = max(times["loaded"])  # by the last worker
    else:
        at |= dict.fromkeys(_OF_LOADS, at["answered"])
        waited_s = 0.0
    return _in_order(sent_s, at, waited_s, sent_s + ttft_s)


def _in_order(sent_s: float, at: Mapping[str, float], waited_s: float, end_s: float) -> Parts | str:
    start_s = max(at["scheduled"], at["loaded"])
    loads = (at[name] for name in _OF_LOADS)
    marks = [sent_s, at["arrived"], at["asked"], at["answered"], *loads, start_s, end_s - waited_s]
    if any(later < earlier for earlier, later in pairwise(marks)):
        return "what was noted is not in order, so that parts would not sum to TTFT"
    return Parts(
        arrival_s=at["arrived"] - sent_s,
        lookup_s=at["answered"] - at["asked"],
        placement_s=at["begun"] - at["answered"],
        transfer_s=at["loaded"] - at["begun"] + waited_s,
        waiting_s=at["asked"] - at["arrived"] + start_s - at["loaded"],
        first_step_s=end_s - start_s - waited_s,
    )
