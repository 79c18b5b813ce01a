"""Steps of one engine, in order: the gaps of all its requests, kept once for all of them.

Every sequence that decodes gets a token each step, so that a step's time is a gap of each of them.
A request needs to know only from which entry to which it was there.
"""


class Timeline:
    """Runs of steps alike: ``step_s`` each, ``num_steps`` of them, ``num_gaps`` a step."""

    __slots__ = ("num_gaps", "num_steps", "step_s")

    def __init__(self) -> None:
        """No step yet."""
        self.step_s: list[float] = []
        self.num_steps: list[int] = []
        self.num_gaps: list[int] = []

    def __len__(self) -> int:
        return len(self.step_s)

    def add(self, duration_s: float, num_steps: int, num_gaps: int) -> None:
        """Steps that took so long together."""
        self.step_s.append(duration_s / num_steps)
        self.num_steps.append(num_steps)
        self.num_gaps.append(num_gaps)
