"""A sweep from options to a report, whatever its cases are."""

import logging
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Generic, Protocol, TypeVar

from kvxfer.closing import Closing
from kvxfer.errors import KvxferError, LayoutMismatch, NotAvailable, PeerLost, VerificationError
from kvxfer.sweep.cases import SweepOptions
from kvxfer.sweep.environment import environment
from kvxfer.sweep.paths import require_applicable, resolve_transport
from kvxfer.sweep.result import SCHEMA, Skipped, SweepReport, SweepResult
from kvxfer.sweep.samples import default_iters
from kvxfer.transport.choice import slow_path

_log = logging.getLogger(__name__)
# The channel that carried an error of the far side, which is of no use to a reader here.
_CHANNEL = re.compile(r"\btcp://\S+: ")


class Case(Protocol):
    """What is measured for one row."""

    @property
    def label(self) -> str:
        """A short name for progress and errors."""

    @property
    def total_bytes(self) -> int:
        """Bytes of the request."""


_CaseT = TypeVar("_CaseT", bound=Case)


class CaseRun(Closing, Generic[_CaseT]):
    """A sweep under way. A context manager; the report grows as cases end.

    Attributes:
        report: what has been measured so far.
        cases: all cases, in order.
    """

    cases: Sequence[_CaseT]

    def __init__(self, options: SweepOptions) -> None:
        """Check the options.

        Raises:
            InvalidUsage: an option is wrong.
            NotAvailable: the transport does not work here.
        """
        self._options = options
        self._transport = resolve_transport(options.transport, options.far_address)
        require_applicable(options, self._transport)
        self.report = SweepReport(schema=SCHEMA, environment=environment(), results=[])
        self._stack = ExitStack()

    @property
    def num_rounds(self) -> int:
        """Timed rounds of all cases: the length of a progress bar."""
        return sum(self.rounds_of(case) for case in self.cases)

    def rounds_of(self, case: _CaseT) -> int:
        """Timed rounds of one case."""
        return self._options.iters or default_iters(case.total_bytes)

    def run_case(
        self, case: _CaseT, on_round: Callable[[], None] = lambda: None
    ) -> SweepResult | None:
        """Measure one case into the report; None where it was skipped or failed.

        Raises:
            PeerLost: a process of the sweep ended.
        """
        try:
            result = self._judge_path(self._measure(case, on_round))
        except (LayoutMismatch, NotAvailable, VerificationError) as error:
            failed = isinstance(error, VerificationError) or self._is_strict(case, error)
            self._note_skipped(case, error, failed=failed)
            return None
        except KvxferError as error:
            self._note_skipped(case, error, failed=True)
            if self._goes_on_after(case):
                return None
            if not isinstance(error, PeerLost):
                self._require_alive()
            raise
        self.report.results.append(result)
        _log.info("%s: %.4g GB/s", case.label, result.gb_per_s.p50)
        return result

    def close(self) -> None:
        """End the other processes; may be called more than once."""
        self._stack.close()

    @abstractmethod
    def _measure(self, case: _CaseT, on_round: Callable[[], None]) -> SweepResult:
        """Prove and time one case."""

    @abstractmethod
    def _require_alive(self) -> None:
        """Raise PeerLost where a process of the sweep has ended."""

    def _goes_on_after(self, case: _CaseT) -> bool:
        """Whether an error of one case says nothing of the others."""
        return False

    def _layouts_of(self, case: _CaseT) -> tuple[str, str]:
        """Source and destination, for a case that is skipped."""
        return "", ""

    def _note_skipped(self, case: _CaseT, error: KvxferError, *, failed: bool) -> None:
        reason = _CHANNEL.sub("", str(error))
        self.report.skipped.append(Skipped(case.label, reason, failed, *self._layouts_of(case)))
        # Not an error here: the report says it.
        _log.info("%s: %s", case.label, reason)

    def _judge_path(self, result: SweepResult) -> SweepResult:
        """A transport asked for by name must be what carried the bytes."""
        text = slow_path(self._transport, result.actual_path)
        if text:
            if self._options.transport != "auto":
                raise VerificationError(f"{text}, though {self._transport} was asked for")
            if self._options.strict:
                raise VerificationError(f"{text} (--strict)")
            result.notes.append(text)
        return result

    def _is_strict(self, case: _CaseT, error: KvxferError) -> bool:
        """Whether a row that takes no path here is an error."""
        is_own = not self._goes_on_after(case)
        return self._options.strict and is_own and isinstance(error, NotAvailable)
