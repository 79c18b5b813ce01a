"""What links by a network library share: a transfer moves in ``post``, long rows by themselves."""

import threading
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from kvxfer.errors import InvalidUsage
from kvxfer.layout import CopyPlan
from kvxfer.transport.base import FinishedTransfer, Link, Op, Transfer, Tuning
from kvxfer.transport.host_copy import refuse_gpu_options

ENGINES = ("auto", "direct", "staged")


class NetworkLink(Link):
    """A link that numbers its transfers and runs one at a time.

    Attributes:
        transport: the name of its transport.
        direct_bytes: for each of ``ENGINES``, from how many bytes on a row travels by itself.
    """

    transport: ClassVar[str]
    direct_bytes: ClassVar[Mapping[str, int]]
    _sequence: int  # of the last transfer; the peer says where it begins

    def __init__(self) -> None:
        """Of a connection that is made next."""
        self._lock = threading.Lock()

    def post(
        self,
        plan: CopyPlan,
        op: Op,
        *,
        tuning: Tuning | None = None,
        after_stream: int | None = None,
    ) -> Transfer:
        """Move now, in the calling thread and the pool's; the GIL is released meanwhile."""
        tuning = tuning or Tuning()
        refuse_gpu_options(tuning, after_stream)
        if tuning.engine not in ENGINES:
            raise InvalidUsage(
                f"engine {tuning.engine!r} with {self.transport}; use auto, direct or staged"
            )
        with self._lock:
            path = self._copy(plan, op, self.direct_bytes[tuning.engine])
            self._sequence += 1
            return FinishedTransfer(plan.total_bytes, path, self._sequence)

    @abstractmethod
    def _copy(self, plan: CopyPlan, op: Op, direct_bytes: int) -> str:
        """Move all of ``plan`` as the next transfer; returns what carried it."""

    def limit_tuning(self) -> Tuning:
        """No copy on either side."""
        return Tuning(engine="direct")
