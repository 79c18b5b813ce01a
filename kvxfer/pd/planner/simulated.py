"""What a simulation found: every request's times, every gap, and what the engines held."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvxfer.pd.analysis.replies import Replies, Reply
from kvxfer.pd.planner.jitter import Jitter
from kvxfer.pd.planner.setup import Setup
from kvxfer.pd.planner.simulation.job import Piece
from kvxfer.pd.planner.simulation.timeline import Timeline
from kvxfer.pd.planner.times import Floats, Times

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A set-up under a trace. Arrays have an entry a request, in the order of the trace.

    Args:
        setup: what was simulated.
        sent_s: when the client sent it.
        ttft_s: from sending to the first token.
        first_gap_s: first to second token; NaN for a reply of one token.
        e2el_s: from sending to the last token.
        queue_s: from sending to the engine's taking it up.
        transfer_s: from the end of the prefill to the KV being on the decode engine, the wait for
            memory there included; 0 in an aggregated set-up.
        num_prompt_tokens, num_output_tokens: of the trace.
        num_hit_tokens: of the prompt, that were found in a cache or store.
        gaps: of all requests pooled, first ones included.
        later_gaps: the same without first ones.
        duration_s: from the first request sent to the last token.
        peak_kv_tokens: the most that each engine's requests held at once.
        kv_capacity_tokens: of each engine, None: no limit.
        num_preempted: requests that each engine put back for want of memory, and computed anew.
        busy: share of the time in which each engine ran steps, 0 to 1.
        extrapolated: what went beyond the measurements, a text each.
        timelines, pieces, jitter: what :meth:`gaps_of` reads.
    """

    setup: Setup
    sent_s: Floats
    ttft_s: Floats
    first_gap_s: Floats
    e2el_s: Floats
    queue_s: Floats
    transfer_s: Floats
    num_prompt_tokens: Ints
    num_output_tokens: Ints
    num_hit_tokens: Ints
    gaps: Times
    later_gaps: Times
    duration_s: float
    peak_kv_tokens: tuple[int, ...]
    kv_capacity_tokens: tuple[int | None, ...]
    num_preempted: tuple[int, ...]
    busy: tuple[float, ...]
    extrapolated: tuple[str, ...]
    timelines: Sequence[Timeline] = field(repr=False)
    pieces: Sequence[Sequence[Piece]] = field(repr=False)
    jitter: Jitter
    first_tokens_together: bool

    @property
    def requests_per_s(self) -> float:
        """Completed requests a second."""
        return len(self.sent_s) / self.duration_s

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens a second, of all requests."""
        return float(self.num_output_tokens.sum()) / self.duration_s

    def gaps_of(self, index: int) -> Floats:
        """Gaps of one request in seconds, float64 [output tokens - 1], first to last.

        With an engine's jitter each is drawn anew, the same for the same request.
        """
        nothing = (np.empty(0), np.empty(0))
        parts = [nothing, *map(self._gaps, self.pieces[index])]
        gaps_s, num_gaps = map(np.concatenate, zip(*parts, strict=True))
        gaps_s = self.jitter.drawn(gaps_s, num_gaps == 1, seed=index)
        if self.first_tokens_together and len(gaps_s):
            gaps_s[0] = 0.0
        return gaps_s

    def replies(self) -> Replies:
        """As the analysis of measured runs takes them, for goodput and reports."""
        replies = [
            Reply(
                index=index,
                ttft_ms=float(self.ttft_s[index]) * 1e3,
                e2el_ms=float(self.e2el_s[index]) * 1e3,
                num_tokens=int(self.num_output_tokens[index]),
                gaps_ms=self.gaps_of(index) * 1e3,
            )
            for index in range(len(self.sent_s))
        ]
        return Replies(completed=replies, failed=[], without_role=False)

    def _gaps(self, piece: Piece) -> tuple[Floats, Floats]:
        """Gaps, and how many requests had each."""
        if not isinstance(piece, tuple):
            return np.array([piece]), np.zeros(1)
        engine, first, end = piece
        timeline = self.timelines[engine]
        steps = timeline.num_steps[first:end]
        return (
            np.repeat(timeline.step_s[first:end], steps),
            np.repeat(np.array(timeline.num_gaps[first:end], float), steps),
        )
