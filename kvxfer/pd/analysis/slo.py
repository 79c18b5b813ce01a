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
failed is not good. A reply of one token has no gaps and no TPOT, and is judged on the rest. One of
several tokens whose gaps nobody saw, because they came in one message, is not good where gaps are
limited: what was not measured was not met.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from kvxfer.errors import InvalidUsage
from kvxfer.pd.analysis.replies import Replies, Reply
from kvxfer.pd.numerals import decimal
from kvxfer.pd.summary import Goodput

KEYS = ("ttft", "first_gap", "itl", "tpot", "e2el")
_STATISTIC = re.compile(r"p([0-9]{1,3}(?:\.[0-9]{1,6})?)|mean|max")
_REMEDY = "write KEY:MS, or itl:p99:MS, separated by commas"


class _Named(Protocol):
    @property
    def key(self) -> str: ...
    @property
    def percent(self) -> float | None: ...


_Limit = TypeVar("_Limit", bound=_Named)


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
        return reply.num_tokens < 2 if value is None else value <= self.limit_ms

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
    return parse_each(text, _parse, _REMEDY)


def parse_each(text: str, parse: Callable[[str], _Limit], remedy: str) -> tuple[_Limit, ...]:
    """Read limits that commas part, each by ``parse``.

    Raises:
        InvalidUsage: there is none, with ``remedy``, or one thing is limited twice.
    """
    limits = tuple(parse(part.strip()) for part in text.split(",") if part.strip())
    if not limits:
        raise InvalidUsage(f"--slo {text!r} names nothing; {remedy}")
    kinds = [(one.key, one.percent) for one in limits]
    if len(set(kinds)) < len(kinds):
        raise InvalidUsage(f"--slo {text!r} limits one thing twice; give one limit for each")
    return limits


def require_key(key: str) -> None:
    """Check what a limit is of.

    Raises:
        InvalidUsage: it is none of `KEYS`.
    """
    if key not in KEYS:
        raise InvalidUsage(f"--slo: {key!r} is not known; use {', '.join(KEYS)}")


def parse_limit_ms(text: str) -> float:
    """Read a limit in milliseconds.

    Raises:
        InvalidUsage: it is no time above zero.
    """
    limit_ms = decimal(text)
    if not 0.0 < limit_ms < math.inf:
        raise InvalidUsage(f"--slo: {text!r} is not a limit in milliseconds above zero")
    return limit_ms


def _parse(text: str) -> Objective:
    key, *rest = text.split(":")
    require_key(key)
    if not 1 <= len(rest) <= (2 if key == "itl" else 1):
        raise InvalidUsage(f"--slo: cannot read {text!r}; {_REMEDY}")
    percent = _percent(rest[0]) if len(rest) == 2 else 100.0
    return Objective(key, parse_limit_ms(rest[-1]), percent)


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
