"""What a link of `ucx` asks of the native one; a stand-in for that."""

from typing import Any

import pytest

from kvxfer.layout import CopyPlan
from kvxfer.transport import Op, Tuning
from kvxfer.transport.ucx import _UcxLink
from kvxfer.tuning import NO_SECTION, Slots

DEFAULT_NUM_SMS = 8


class StandIn:
    """A native link whose transfers end at once."""

    first_sequence, transports = 0, "tcp/lo"

    def __init__(self) -> None:
        self.num_sms: list[int] = []

    def start_put(self, tables: Any, sequence: int, direct_bytes: int, num_sms: int) -> None:
        self.num_sms.append(num_sms)

    start_get = start_put

    def poll(self, timeout_s: float) -> bool:
        return True

    def close(self) -> bool:
        return True


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("asked", [0, 4, 16])
def test_sm_budgets_are_kept_and_told(op: Op, asked: int) -> None:
    native: Any = StandIn()
    slots = Slots(place="pinned", num_slots=4, slot_bytes=1 << 20)
    options: Any = {"stall_s": 20.0, "section": NO_SECTION, "num_threads": 1, "slots": slots}
    with _UcxLink(native, [], [], device=0, **options) as link:
        transfer = link.post(CopyPlan.contiguous(4096, 8192, 64), op, tuning=Tuning(num_sms=asked))
    expected = asked or DEFAULT_NUM_SMS
    assert (native.num_sms, transfer.num_sms) == ([expected], expected)
