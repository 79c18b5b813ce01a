"""A diagnosis: schema ``kvxfer.diagnose/1``. Fields are only ever added within version 1."""

from enum import Enum

import msgspec

from kvxfer.diagnose.facts import Facts
from kvxfer.diagnose.figures import Figures

SCHEMA = "kvxfer.diagnose/1"


class Verdict(str, Enum):
    """How a check ended; the later, the worse."""

    NOT_APPLICABLE = "N/A"
    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"

    @property
    def rank(self) -> int:
        """0 for not applicable to 3 for a failure."""
        return list(Verdict).index(self)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong.

    Attributes:
        verdict: WARN or FAIL.
        where: the GPU, pair, NIC or part of the host.
        evidence: what was seen.
        cause: the likely cause.
        remedy: what to do, in one line.
    """

    verdict: Verdict
    where: str
    evidence: str
    cause: str
    remedy: str


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one check ended.

    Attributes:
        check: its name.
        title: what it asks.
        verdict: of the worst finding; else PASS or N/A.
        evidence: what was seen where all is well; why not where it does not apply.
        findings: what is wrong.
    """

    check: str
    title: str
    verdict: Verdict
    evidence: str = ""
    findings: tuple[Finding, ...] = ()


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What differs from an older report: of a figure, a verdict or a fact."""

    what: str
    before: str
    after: str
    worse: bool


class DiagnoseReport(msgspec.Struct, kw_only=True):
    """A whole diagnosis, as ``--json`` writes it.

    Attributes:
        schema: :data:`SCHEMA`.
        environment: versions and date, all text.
        facts: the node.
        figures: what was measured.
        checks: the worst first; wrong bytes before anything slow.
        changes: against the older report that was named.
        elapsed_s: seconds of all of it.
    """

    schema: str
    environment: dict[str, str]
    facts: Facts
    figures: Figures
    checks: list[CheckResult]
    changes: list[Change] = []
    elapsed_s: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """The worst of all checks."""
        return max((check.verdict for check in self.checks), key=lambda one: one.rank)

    @property
    def has_finding(self) -> bool:
        """Whether anything is wrong."""
        return self.verdict.rank >= Verdict.WARN.rank or any(one.worse for one in self.changes)
