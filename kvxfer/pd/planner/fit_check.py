"""How far an engine's costs are from the steps that they were fitted to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvxfer.pd.planner.engine_model import StepModel
from kvxfer.pd.planner.fitting import StepRow

MOST_OFF: Final = 0.3
"""Of a measured step: a fit that is further off is of no engine that the model knows."""


@dataclass(frozen=True, slots=True)
class FittedRow:
    """One row and what the costs say of it: seconds of ``num_steps`` of the row."""

    what: str
    row: StepRow
    fitted_s: float

    @property
    def error(self) -> float:
        """Relative, 0 where nothing was measured: 0.05 is 5 % too long."""
        return 0.0 if self.row.is_assumed else self.fitted_s / self.row.step_s - 1.0


def fitted_rows(steps: StepModel, rows: Sequence[StepRow]) -> list[FittedRow]:
    """Every row beside the fit; names say the set-up where the rows are of several."""
    names_setups = len({row.setup for row in rows if not row.is_assumed}) > 1
    found = []
    for row in rows:
        count = row.num_steps
        fitted_s = steps.step_s(
            num_decoding=row.num_decoding / count,
            num_context_tokens=row.num_context_tokens / count,
            num_prompt_tokens=row.num_prompt_tokens / count,
            num_pairs=row.num_pairs / count,
        )
        where = f"{row.setup}: " if names_setups and row.setup else ""
        found.append(FittedRow(where + _what(row), row, fitted_s * count))
    return found


def misfits(rows: Sequence[FittedRow]) -> str:
    """What is off by more than ``MOST_OFF``, in words; empty where nothing is."""
    off = [one for one in rows if abs(one.error) > MOST_OFF]
    if not off:
        return ""
    worst = max(off, key=lambda one: abs(one.error))
    measured = sum(not one.row.is_assumed for one in rows)
    return (
        f"{len(off)} of {measured} measured steps are fitted more than {MOST_OFF:.0%} off, "
        f"the worst {worst.error:+.0%} ({worst.what})"
    )


def _what(row: StepRow) -> str:
    count = row.num_prompt_tokens
    if count:
        return f"prompt of {count:.0f} token{'' if count == 1 else 's'}"
    each = row.num_context_tokens / row.num_decoding
    return f"{row.num_decoding:.0f} decoding, {each:.0f} tokens of context each"
