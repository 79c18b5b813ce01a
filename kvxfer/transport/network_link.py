"""What links by a network library share: a transfer moves in ``post``, long rows by themselves."""

import threading
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from kvxfer.errors import InvalidUsage, TransferTimeout
from kvxfer.layout import CopyPlan
from kvxfer.transport import tuned
from kvxfer.transport.base import FinishedTransfer, Link, Op, Transfer, Tuning
from kvxfer.transport.host_copy import refuse_gpu_options
from kvxfer.transport.stream_mark import After, StreamMark, mark
from kvxfer.tuning import ENGINES_OF, Section

_LOOK_S = 20e-6
ENGINES = ENGINES_OF["ucx"]  # of all network libraries


class Carried(NamedTuple):
    """What a transfer was carried by.

    Attributes:
        path: for people.
        num_sms: SMs of this side's GPU that gathered or scattered; 0 for none.
    """

    path: str
    num_sms: int = 0


class NetworkLink(Link):
    """A link that numbers its transfers and runs one at a time.

    Attributes:
        transport: the name of its transport.
        direct_bytes: for each of ``ENGINES``, from how many bytes on a row travels by itself.
        device: the CUDA device of this side's pages; -1 for host memory.
    """

    transport: ClassVar[str]
    copies_in_post = True
    direct_bytes: Mapping[str, int]
    _sequence: int  # of the last transfer; the peer says where it begins

    def __init__(self, device: int, stall_s: float, section: Section, num_threads: int) -> None:
        """Of a connection that is made next.

        Args:
            device: the CUDA device of this side's pages; -1 for host memory.
            stall_s: how long a transfer may stand still.
            section: what the profile says of it.
            num_threads: of this side's copies in host memory.
        """
        self.device = device
        self.num_threads = num_threads if device < 0 else 0
        self._section = section
        self._stall_s = stall_s
        self._lock = threading.Lock()

    def post(
        self,
        plan: CopyPlan,
        op: Op,
        *,
        tuning: Tuning | None = None,
        after: After = None,
    ) -> Transfer:
        """Move now, in the calling thread and the pool's; the GIL is released meanwhile."""
        tuning = tuning or Tuning()
        if self.device < 0:
            refuse_gpu_options(tuning, after)
        reached = mark(self.device, after)
        rule = tuned.rule_for(self._section, op.value, plan)
        engine = rule.engine if tuning.engine == "auto" else tuning.engine
        if engine not in ENGINES:
            raise InvalidUsage(
                f"engine {engine!r} with {self.transport}; use auto, direct or staged"
            )
        num_sms = tuning.num_sms or rule.num_sms
        with self._lock:
            if reached is not None:
                self._await(reached)
            carried = self._copy(plan, op, self.direct_bytes[engine], num_sms)
            self._sequence += 1
            transfer = FinishedTransfer(plan.total_bytes, carried.path, self._sequence)
            transfer.num_sms = carried.num_sms
            return transfer

    @abstractmethod
    def _copy(self, plan: CopyPlan, op: Op, direct_bytes: int, num_sms: int) -> Carried:
        """Move all of ``plan`` as the next transfer; ``num_sms`` 0 = the measured best."""

    def _await(self, reached: StreamMark) -> None:
        """Wait until a stream has come so far: what a network sends is ordered behind no stream."""
        deadline = time.monotonic() + self._stall_s
        while not reached.is_reached():
            if time.monotonic() >= deadline:
                raise TransferTimeout(
                    f"the stream's work before a transfer did not end within {self._stall_s} s; "
                    "nothing was sent"
                )
            time.sleep(_LOOK_S)

    def limit_tuning(self) -> Tuning:
        """No copy on either side."""
        return Tuning(engine="direct")
