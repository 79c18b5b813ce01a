"""What a check is: a question, and a pure function of facts and figures that answers it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvxfer.diagnose.facts import Facts, Gpu
from kvxfer.diagnose.figures import Figures
from kvxfer.diagnose.result import CheckResult, Finding, Verdict


@dataclass(frozen=True, slots=True)
class Fine:
    """All is well; what was seen."""

    evidence: str


@dataclass(frozen=True, slots=True)
class Absent:
    """The check does not apply here, or cannot be made; why."""

    reason: str


Answer: TypeAlias = Fine | Absent | Sequence[Finding]


@dataclass(frozen=True, slots=True)
class Check:
    """A check.

    Attributes:
        name: short, as the report and the metrics name it.
        title: what it asks.
        ask: answers it; findings mean that something is wrong, none of them that nothing is.
    """

    name: str
    title: str
    ask: Callable[[Facts, Figures], Answer]

    def run(self, facts: Facts, figures: Figures) -> CheckResult:
        """The answer as a result."""
        answer = self.ask(facts, figures)
        if isinstance(answer, Fine):
            return self._result(Verdict.PASS, answer.evidence)
        if isinstance(answer, Absent):
            return self._result(Verdict.NOT_APPLICABLE, answer.reason)
        findings = sorted(answer, key=lambda one: -one.verdict.rank)
        return CheckResult(
            check=self.name,
            title=self.title,
            verdict=findings[0].verdict,
            findings=tuple(findings),
        )

    def _result(self, verdict: Verdict, evidence: str) -> CheckResult:
        return CheckResult(check=self.name, title=self.title, verdict=verdict, evidence=evidence)


def warn(where: str, evidence: str, *, cause: str, remedy: str) -> Finding:
    """A finding that costs speed, or may."""
    return Finding(verdict=Verdict.WARN, where=where, evidence=evidence, cause=cause, remedy=remedy)


def fail(where: str, evidence: str, *, cause: str, remedy: str) -> Finding:
    """A finding with which transfers are wrong, impossible or far below what was bought."""
    return Finding(verdict=Verdict.FAIL, where=where, evidence=evidence, cause=cause, remedy=remedy)


def answer(findings: Sequence[Finding], evidence: str) -> Answer:
    """The findings, or that all is well."""
    return findings or Fine(evidence)


def describe(gpu: Gpu) -> str:
    """A GPU as findings name it."""
    return f"GPU {gpu.index}{f' ({gpu.pci})' if gpu.pci else ''}"


def no_gpus(facts: Facts) -> Absent:
    """Why a check of GPUs does not apply."""
    if facts.host.gpu_pcis:
        return Absent("the driver shows no GPU")
    return Absent(
        "no GPU here" if facts.gpus == () or facts.host.gpu_pcis == () else _unknown(facts)
    )


def _unknown(facts: Facts) -> str:
    return f"no GPU is known of: {facts.sources.get('GPUs', 'nothing was read')}"


def listed(names: Sequence[str], most: int = 6) -> str:
    """Names with commas, the first few of them."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
