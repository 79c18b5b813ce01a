"""Faults of a measurement that its figures do not show: each check names what it saw, or nothing.

Nothing is dropped for them. The faults are those known of ``vllm bench serve`` and of proxies
before it: messages taken for tokens, prompts of another length than asked for, usage that is short
by a token, failures counted as replies of no time.
"""

from collections.abc import Callable, Iterator

import numpy as np

from kvxfer.pd.analysis.replies import ONE_READ_MS, Replies
from kvxfer.pd.result import PDPoint
from kvxfer.pd.summary import Finding
from kvxfer.pd.vllm_json import BenchResult

PROMPT_TOLERANCE = 0.01
_CLOCK_MS = 1.0  # e2el and the sum of gaps are read off one clock
_MAX_ERROR_CHARS = 200

_Check = Callable[[PDPoint, BenchResult, Replies], Iterator[Finding]]


def faults_of(point: PDPoint, result: BenchResult, replies: Replies) -> list[Finding]:
    """Everything found, what the run itself saw first."""
    seen = [Finding(text, serious=False) for text in point.findings]
    return seen + [found for check in CHECKS for found in check(point, result, replies)]


def failures(point: PDPoint, result: BenchResult, replies: Replies) -> Iterator[Finding]:
    """Requests that failed, with the first one's error."""
    if replies.failed:
        lines = (result.errors[replies.failed[0]] or "no token came").strip().splitlines()
        cause = lines[-1][:_MAX_ERROR_CHARS]
        yield Finding(f"{_of(len(replies.failed), result)} requests failed: {cause}", True)


def counts(point: PDPoint, result: BenchResult, replies: Replies) -> Iterator[Finding]:
    """Requests that are missing, and replies that the client counted and that have no token."""
    if result.num_requests != point.num_prompts:
        yield Finding(f"{result.num_requests} requests recorded, {point.num_prompts} sent", True)
    if result.completed != len(replies.completed):
        yield Finding(
            f"the client counted {result.completed} replies; {len(replies.completed)} have tokens",
            True,
        )


def output_lengths(point: PDPoint, result: BenchResult, replies: Replies) -> Iterator[Finding]:
    """Replies of another length than asked for; those of a trace are of many lengths."""
    if point.trace:
        return
    lengths = [reply.num_tokens for reply in replies.completed]
    short = [length for length in lengths if length < point.osl]
    longer = [length for length in lengths if length > point.osl]
    if short and set(lengths) == {point.osl - 1}:
        yield Finding(
            f"every reply is one token short of {point.osl}: the usage of a proxy that answers "
            "the first token itself",
            True,
        )
    elif short:
        yield Finding(
            f"{_of(len(short), result)} replies ended before their {point.osl} tokens "
            f"(the shortest after {min(short)})",
            True,
        )
    if longer:
        yield Finding(
            f"{_of(len(longer), result)} replies are longer than {point.osl} tokens (to "
            f"{max(longer)}): counted by the client from the text, for want of a usage",
            True,
        )


def prompt_lengths(point: PDPoint, result: BenchResult, replies: Replies) -> Iterator[Finding]:
    """Prompts whose length is off by more than ``PROMPT_TOLERANCE``; not of a trace."""
    if point.trace:
        return
    lengths = [result.input_lens[reply.index] for reply in replies.completed]
    off = [size for size in lengths if abs(size - point.isl) > PROMPT_TOLERANCE * point.isl]
    if off:
        yield Finding(
            f"{_of(len(off), result)} prompts are not of {point.isl} tokens "
            f"({min(off)} to {max(off)})",
            False,
        )


def messages(point: PDPoint, result: BenchResult, replies: Replies) -> Iterator[Finding]:
    """Streams with more or fewer messages than tokens."""
    if replies.without_role:
        yield Finding(
            "the first message of each stream names the role and has no token: left out, so that "
            "TTFT runs to the second",
            False,
        )
    surplus = [len(reply.gaps_ms) + 1 - reply.num_tokens for reply in replies.completed]
    more, fewer = sum(one > 0 for one in surplus), sum(one < 0 for one in surplus)
    if more:
        yield Finding(
            f"{_of(more, result)} replies have messages without a token (to {max(surplus)} each): "
            "an empty message ends a gap too early",
            False,
        )
    if fewer:
        yield Finding(
            f"{_of(fewer, result)} replies have messages of several tokens: a gap there is not "
            "one token's",
            False,
        )


def one_read(point: PDPoint, result: BenchResult, replies: Replies) -> Iterator[Finding]:
    """Gaps that are none, because the client found several messages in one read."""
    gaps_ms = replies.gaps_ms()
    joined = int(np.count_nonzero(gaps_ms < ONE_READ_MS))
    if joined:
        yield Finding(
            f"{joined} of {len(gaps_ms)} gaps ({joined / len(gaps_ms):.2%}) are under "
            f"{ONE_READ_MS} ms: messages that came together, so that the gap before is too long",
            False,
        )


def times_add_up(point: PDPoint, result: BenchResult, replies: Replies) -> Iterator[Finding]:
    """Whether TTFT and gaps end where the reply ends."""
    if result.latencies is None:
        yield Finding("no `latencies` from this client: E2EL is TTFT and all gaps", False)
    apart_ms = [
        abs(reply.e2el_ms - reply.ttft_ms - reply.gaps_ms.sum()) for reply in replies.completed
    ]
    off = [value for value in apart_ms if value > _CLOCK_MS]
    if off:
        yield Finding(
            f"{_of(len(off), result)} replies do not end with their last gap (to {max(off):.0f} "
            "ms apart): messages are missing, or E2EL includes what comes after the last token",
            True,
        )


def in_flight(point: PDPoint, result: BenchResult, replies: Replies) -> Iterator[Finding]:
    """More requests at once than the client was told, by their own start and end times."""
    if result.start_times is None:
        return
    events = []
    for reply in replies.completed:
        start_ms = result.start_times[reply.index] * 1e3
        events += [(start_ms, 1), (start_ms + reply.e2el_ms, -1)]
    most = max(np.cumsum([step for _, step in sorted(events)]), default=0)
    if most > point.concurrency:
        yield Finding(f"{most} requests at once, {point.concurrency} were asked for", True)


def served_tokens(point: PDPoint, result: BenchResult, replies: Replies) -> Iterator[Finding]:
    """What the engines counted, beside what the client did."""
    for name, served, counted in (
        ("prompt", point.served_prompt_tokens, sum(result.input_lens)),
        ("output", point.served_output_tokens, sum(result.output_lens)),
    ):
        if served is not None and served != counted and not replies.failed:
            yield Finding(f"the engines counted {served} {name} tokens, usage {counted}", True)


CHECKS: tuple[_Check, ...] = (
    failures,
    counts,
    output_lengths,
    prompt_lengths,
    messages,
    one_read,
    times_add_up,
    in_flight,
    served_tokens,
)


def _of(count: int, result: BenchResult) -> str:
    return f"{count} of {result.num_requests}"
