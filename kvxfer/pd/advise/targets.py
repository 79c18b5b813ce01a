"""What a service promises: ``ttft:p99:500,itl:p99:30``, over all requests of the interval.

A server's histograms tell of all values pooled and not of each request, so a target is a percentile
of all of them (or ``mean``), where `kvxfer.pd.analysis.slo` judges each request on its own.
``ttft``, ``first_gap``, ``tpot`` and ``e2el`` have a value a request, ``itl`` a value a gap.
"""

import math
import re
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from kvxfer.errors import InvalidUsage
from kvxfer.pd.advise.buckets import Between, Buckets
from kvxfer.pd.analysis.slo import parse_each, parse_limit_ms, require_key
from kvxfer.pd.summary import Distribution, PointSummary

Verdict: TypeAlias = Literal["holds", "broken", "unclear", "idle", "missing"]
_PERCENT: Final = re.compile(r"p([0-9]{1,3}(?:\.[0-9]{1,6})?)")
_REMEDY: Final = "write KEY:pNN:MS or KEY:mean:MS, separated by commas, as ttft:p99:500,itl:p99:30"


@dataclass(frozen=True, slots=True)
class Target:
    """A limit in milliseconds on a percentile; ``percent`` is None for the mean."""

    key: str
    percent: float | None
    limit_ms: float

    @property
    def name(self) -> str:
        """``TTFT P99``."""
        key = self.key.replace("_", " ") if self.key == "first_gap" else self.key.upper()
        return f"{key} mean" if self.percent is None else f"{key} P{self.percent:g}"

    def __str__(self) -> str:
        return f"{self.name} <= {self.limit_ms:g} ms"

    def judge(self, buckets: Buckets | None) -> "Judged":
        """Hold what was counted, in seconds, against the limit."""
        if buckets is None:
            return Judged(self, "missing", None)
        if not buckets.count:
            return Judged(self, "idle", None)
        if self.percent is None:
            mean = buckets.mean
            found = Between(mean, mean, mean)
        else:
            found = buckets.percentile(self.percent)
        limit_s = self.limit_ms / 1e3 * (1 + 1e-9)
        verdict: Verdict = "unclear"
        if found.high <= limit_s:
            verdict = "holds"
        elif found.low * (1 + 1e-6) >= limit_s:
            verdict = "broken"
        return Judged(self, verdict, found, round(buckets.count))

    def of(self, summary: PointSummary) -> float:
        """The same of a predicted run, in milliseconds; NaN where it has no such value."""
        values: Distribution = getattr(summary, self.key)
        if self.percent is None:
            return float(values.values_ms.mean()) if len(values) else math.nan
        return values.percentile(self.percent)


@dataclass(frozen=True, slots=True)
class Judged:
    """A target and what was measured.

    Args:
        verdict: ``unclear``: the limit lies inside the bucket that holds the percentile; ``idle``:
            no value in the interval; ``missing``: the server does not measure it.
        found_s: the percentile, between the bounds of its bucket; None where there is none.
        num_values: that it is of.
    """

    target: Target
    verdict: Verdict
    found_s: Between | None
    num_values: int = 0

    @property
    def words(self) -> str:
        """The percentile and how well it is known: ``4 to 5 ms``."""
        found = self.found_s
        if found is None:
            return "no value" if self.verdict == "idle" else "not measured by this server"
        if math.isinf(found.high):
            return f"above {found.low * 1e3:.4g} ms"
        if found.low == found.high:
            return f"{found.high * 1e3:.4g} ms"
        return f"{found.low * 1e3:.4g} to {found.high * 1e3:.4g} ms"

    @property
    def is_thin(self) -> bool:
        """Whether too few values lie above that percentile for it to say more than the largest."""
        percent = self.target.percent
        return percent is not None and self.num_values * (100.0 - percent) < 100.0


def parse_targets(text: str) -> tuple[Target, ...]:
    """Read ``--slo``.

    Raises:
        InvalidUsage: nothing is named, something is unknown or named twice, or a limit is no time.
    """
    return parse_each(text, _parse, _REMEDY)


def _parse(text: str) -> Target:
    parts = text.split(":")
    if len(parts) != 3:
        raise InvalidUsage(f"--slo: cannot read {text!r}; {_REMEDY}")
    key, statistic, limit = parts
    require_key(key)
    match = _PERCENT.fullmatch(statistic)
    percent = float(match[1]) if match else None
    if (match is None and statistic != "mean") or (percent is not None and percent > 100.0):
        raise InvalidUsage(f"--slo: {text!r} is not p0 to p100, or mean; {_REMEDY}")
    return Target(key, percent, parse_limit_ms(limit))
