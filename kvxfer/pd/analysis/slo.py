"""Service level objectives: ``ttft:200,itl:p99:30``, limits in milliseconds for each request.

=============  ====================================================================================
``ttft``       time to the first token
``first_gap``  first to second token
``itl``        a statistic of the request's own gaps, all of them: ``itl:p99:30`` their 99th
               percentile (linear between samples), ``itl:mean:30`` their mean, ``itl:30`` the
               longest
``tpot``       (E2EL - TTFT) / (tokens - 1)
``e2el``       time to the last token
=============  ====================================================================================

A request is good where it meets all of them; equality meets a limit, as in vLLM. A request that
failed is not good. A reply of one token has no gaps and no TPOT, and is judged on the rest.
"""

import math
import re
from dataclasses import dataclass

import numpy as np

from kvxfer.errors import InvalidUsage
from kvxfer.pd.analysis.replies import Replies, Reply
from kvxfer.pd.summary import Goodput

KEYS = ("ttft", "first_gap", "itl", "tpot", "e2el")
_STATISTIC = re.compile(r"p([0-9]{1,3}(?:\.[0-9]{1,6})?)|mean|max")
_REMEDY = "write KEY:MS, or itl:p99:MS, separated by commas"


@dataclass(frozen=True, slots=True)
class Objective:
    """A limit in milliseconds; ``percent`` is of one request's gaps, None for their mean."""

    key: str
    limit_ms: float
    percent: float | None = 100.0

    def __str__(self) -> str:
        name = self.key.replace("_", " ") if self.key == "first_gap" else self.key.upper()
        if self.key == "itl":
            longest = {None: "mean", 100.0: "max"}
            name = f"a request's ITL {longest.get(self.percent, f'P{self.percent or 0:g}')}"
        return f"{name} <= {self.limit_ms:g} ms"

    def is_met_by(self, reply: Reply) -> bool:
        """Whether a completed request meets it."""
        value = self.value(reply)
        return value is None or value <= self.limit_ms

    def value(self, reply: Reply) -> float | None:
        """What is held against the limit, in milliseconds; None where the reply has no such."""
        if self.key == "ttft":
            return reply.ttft_ms
        if self.key == "e2el":
            return reply.e2el_ms
        if self.key == "tpot":
            return reply.tpot_ms
        if not len(reply.gaps_ms):
            return None
        if self.key == "first_gap":
            return float(reply.gaps_ms[0])
        if self.percent is None:
            return float(reply.gaps_ms.mean())
        return float(np.percentile(reply.gaps_ms, self.percent))


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """Read ``--slo``.

    Raises:
        InvalidUsage: nothing is named, a key is unknown or given twice, or a limit is no time.
    """
    objectives = tuple(_parse(part.strip()) for part in text.split(",") if part.strip())
    if not objectives:
        raise InvalidUsage(f"--slo {text!r} names nothing; {_REMEDY}")
    kinds = [(one.key, one.percent) for one in objectives]
    if len(set(kinds)) < len(kinds):
        raise InvalidUsage(f"--slo {text!r} limits one thing twice; give one limit for each")
    return objectives


def _parse(text: str) -> Objective:
    key, *rest = text.split(":")
    if key not in KEYS:
        raise InvalidUsage(f"--slo: {key!r} is not known; use {', '.join(KEYS)}")
    if not 1 <= len(rest) <= (2 if key == "itl" else 1):
        raise InvalidUsage(f"--slo: cannot read {text!r}; {_REMEDY}")
    percent = _percent(rest[0]) if len(rest) == 2 else 100.0
    try:
        limit_ms = float(rest[-1])
    except ValueError:
        limit_ms = math.nan
    if not 0.0 < limit_ms < math.inf:
        raise InvalidUsage(f"--slo: {rest[-1]!r} is not a limit in milliseconds above zero")
    return Objective(key, limit_ms, percent)


def _percent(text: str) -> float | None:
    match = _STATISTIC.fullmatch(text)
    percent = float(match[1]) if match is not None and match[1] else 100.0
    if match is None or percent > 100.0:
        raise InvalidUsage(f"--slo: {text!r} is not p0 to p100, mean or max")
    return None if text == "mean" else percent


def judge(replies: Replies, objectives: tuple[Objective, ...], duration_s: float) -> Goodput:
    """Count the requests that meet every objective."""
    good = sum(all(one.is_met_by(reply) for one in objectives) for reply in replies.completed)
    num_sent = len(replies.completed) + len(replies.failed)
    return Goodput(num_good=good, num_sent=num_sent, requests_per_s=good / duration_s)
