"""All checks. Each is a pure function of facts and figures, so a capture is judged as a node is."""

from kvxfer.diagnose.checks import bytes as checks_of_bytes
from kvxfer.diagnose.checks import (
    driver,
    host,
    isolation,
    kernel_log,
    nics,
    nvlink,
    pcie,
    peer,
    rates,
)
from kvxfer.diagnose.checks.base import Check
from kvxfer.diagnose.facts import Facts
from kvxfer.diagnose.figures import Figures
from kvxfer.diagnose.result import CheckResult

# In the order in which equally bad results are shown: wrong bytes outrank all else.
CHECKS: tuple[Check, ...] = (
    *checks_of_bytes.CHECKS,
    *driver.CHECKS,
    *kernel_log.CHECKS,
    *nvlink.CHECKS,
    *peer.CHECKS,
    *rates.CHECKS,
    *pcie.CHECKS,
    *nics.CHECKS,
    *isolation.CHECKS,
    *host.CHECKS,
)


def run_checks(facts: Facts, figures: Figures) -> list[CheckResult]:
    """The results of all checks, the worst first."""
    results = [check.run(facts, figures) for check in CHECKS]
    return sorted(results, key=lambda result: -result.verdict.rank)
