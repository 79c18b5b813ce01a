"""Transfers that share links.

A transfer occupies one or more ends (a port that sends, a port that receives). At each end the
transfers share alike, and a transfer goes at the rate of its slower end, also where the other end
could then give more to others: a little slower than max-min fairness.
"""

from collections.abc import Callable, Hashable

from kvxfer.pd.planner.simulation.clock import Clock


class _Flow:
    """One transfer: what is left of it in seconds at full rate."""

    __slots__ = ("done", "ends", "left_s", "rate", "since_s", "version")

    def __init__(self, work_s: float, ends: tuple[Hashable, ...], done: Callable[[], None]) -> None:
        self.left_s = work_s
        self.ends = ends
        self.done = done
        self.rate = 0.0
        self.since_s = 0.0
        self.version = 0


class Links:
    """Links of one kind.

    Args:
        clock: the simulation's.
        share: rate of each of so many transfers at one end, by the rate of one alone.
    """

    def __init__(self, clock: Clock, share: Callable[[int], float]) -> None:
        """Nothing is on its way."""
        self._clock = clock
        self._share = share
        self._at: dict[Hashable, dict[_Flow, None]] = {}
        self.most_at_once = 0

    def start(self, work_s: float, ends: tuple[Hashable, ...], done: Callable[[], None]) -> None:
        """Begin a transfer that takes ``work_s`` alone; ``done`` is called when it is over."""
        flow = _Flow(work_s, ends, done)
        flow.since_s = self._clock.now_s
        for end in ends:
            flows = self._at.setdefault(end, {})
            flows[flow] = None
            self.most_at_once = max(self.most_at_once, len(flows))
        self._share_out(ends)

    def _share_out(self, ends: tuple[Hashable, ...]) -> None:
        """Give every transfer at these ends its new rate."""
        touched = {flow: None for end in ends for flow in self._at.get(end, ())}
        now_s = self._clock.now_s
        for flow in touched:
            rate = min(self._share(len(self._at[end])) for end in flow.ends)
            if rate == flow.rate:
                continue
            flow.left_s = max(0.0, flow.left_s - flow.rate * (now_s - flow.since_s))
            flow.since_s, flow.rate = now_s, rate
            flow.version += 1
            self._clock.at(now_s + flow.left_s / rate, self._end, flow, flow.version)

    def _end(self, flow: _Flow, version: int) -> None:
        if version != flow.version:
            return
        for end in flow.ends:
            del self._at[end][flow]
        self._share_out(flow.ends)
        flow.done()
