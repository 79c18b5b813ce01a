"""An engine's costs from measured steps: least squares over costs that are not negative."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvxfer.errors import InvalidUsage
from kvxfer.pd.planner.engine_model import DecodePoint, MeasuredRange, Residual, StepModel

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_MAX_ROUNDS = 1000
_TOLERANCE = 1e-10


@dataclass(frozen=True, slots=True)
class StepRow:
    """One measured step, or the sum of ``num_steps`` that are alike.

    Fields are those of `StepModel.step_s`, sums over the steps; so is ``step_s``.
    ``longest_prompt_tokens`` says which prompts the row stands for; 0: ``num_prompt_tokens``.
    ``setup`` is what it was measured on, empty where there is one. ``is_assumed``: not measured,
    but put in the place of what was not.
    """

    step_s: float
    num_decoding: float = 0.0
    num_context_tokens: float = 0.0
    num_prompt_tokens: float = 0.0
    num_pairs: float = 0.0
    num_steps: float = 1.0
    longest_prompt_tokens: int = 0
    setup: str = ""
    is_assumed: bool = False


def fit_steps(
    rows: Sequence[StepRow],
    *,
    tp_size: int,
    request_s: float = 0.0,
    kv_capacity_tokens: int | None = None,
    max_points: int = 6,
) -> StepModel:
    """Fit the costs of `StepModel`; each row weighs the same, by its relative error.

    Context and batch size are told apart only by rows that vary one and keep the other, base and
    token of a prefill only by prompts of different lengths: rows that do not leave it to chance how
    the cost is shared out, which shows where a prediction leaves the rows.

    Args:
        rows: some without and some with prompt tokens.
        request_s, kv_capacity_tokens: passed on.
        max_points: most points of ``d``; they lie at batch sizes of the rows.

    Raises:
        InvalidUsage: a row of no time or no steps, or no row of either kind.
    """
    decode_rows = [row for row in rows if not row.num_prompt_tokens]
    if not decode_rows or len(decode_rows) == len(rows):
        missing = "without" if not decode_rows else "with"
        raise InvalidUsage(f"no row {missing} prompt tokens among {len(rows)}; measure some")
    if any(not (row.step_s > 0.0 and row.num_steps > 0.0) for row in rows):
        raise InvalidUsage("a row has no time or no steps; use rows above zero")
    knots = _knots([row.num_decoding / row.num_steps for row in decode_rows], max_points)
    table = np.array([_terms(row, knots) for row in rows])
    measured_s = np.array([row.step_s for row in rows])
    costs_s = non_negative_least_squares(table / measured_s[:, None], np.ones(len(rows)))
    return _model(costs_s, knots, rows, tp_size, request_s, kv_capacity_tokens, table @ costs_s)


def _model(
    costs_s: Floats,
    knots: list[int],
    rows: Sequence[StepRow],
    tp_size: int,
    request_s: float,
    kv_capacity_tokens: int | None,
    fitted_s: Floats,
) -> StepModel:
    points_s = np.cumsum(costs_s[: len(knots)])
    context_s, prefill_base_s, token_s, pair_s = (float(value) for value in costs_s[len(knots) :])
    errors = fitted_s / np.array([row.step_s for row in rows]) - 1.0
    return StepModel(
        tp_size=tp_size,
        decode=[DecodePoint(*point) for point in zip(knots, points_s.tolist(), strict=True)],
        context_s=context_s,
        prefill_base_s=prefill_base_s,
        token_s=token_s,
        pair_s=pair_s,
        request_s=request_s,
        kv_capacity_tokens=kv_capacity_tokens,
        measured=_range(rows),
        residual=Residual(
            num_rows=len(rows),
            rms=float(np.sqrt(np.mean(errors**2))),
            worst=float(np.abs(errors).max()),
        ),
    )


def _knots(batch_sizes: Sequence[float], most: int) -> list[int]:
    """Batch sizes for the points of ``d``: all that were measured, or some of them evenly."""
    distinct = sorted({max(1, round(size)) for size in batch_sizes})
    if len(distinct) <= most:
        return distinct
    picked = np.linspace(0, len(distinct) - 1, max(2, most)).round().astype(int)
    return [distinct[at] for at in picked]


def _terms(row: StepRow, knots: list[int]) -> list[float]:
    """What each cost is multiplied by: the rises of ``d`` from point to point, then the others."""
    batch = row.num_decoding / row.num_steps
    rises = [
        float(np.clip((batch - low) / (high - low), 0.0, None if high == knots[-1] else 1.0))
        for low, high in pairwise(knots)
    ]
    with_chunks = row.num_prompt_tokens > 0
    return [
        0.0 if with_chunks else row.num_steps,
        *(row.num_steps * rise for rise in rises),
        row.num_context_tokens,
        row.num_steps if with_chunks else 0.0,
        row.num_prompt_tokens,
        row.num_pairs,
    ]


def _range(rows: Sequence[StepRow]) -> MeasuredRange:
    per_step = [(row.num_decoding, row.num_context_tokens, row.num_steps) for row in rows]
    prompts = [row.longest_prompt_tokens or row.num_prompt_tokens for row in rows]
    return MeasuredRange(
        num_decoding=max(1, round(max(batch / steps for batch, _, steps in per_step))),
        num_context_tokens=max(1, round(max(context / steps for _, context, steps in per_step))),
        num_prompt_tokens=max(1, round(max(prompts))),
    )


def non_negative_least_squares(table: Floats, wanted: Floats) -> Floats:
    """``x >= 0`` with the least ``|table @ x - wanted|``, by Lawson and Hanson's active sets.

    Source: C. L. Lawson and R. J. Hanson, Solving Least Squares Problems, 1974, chapter 23.

    Args:
        table: float64 [rows, unknowns].
        wanted: float64 [rows].
    """
    scale = np.linalg.norm(table, axis=0)
    scaled = table / np.where(scale > 0.0, scale, 1.0)
    found = np.zeros(table.shape[1])
    free = np.zeros(table.shape[1], bool)
    for _ in range(_MAX_ROUNDS):
        pull = scaled.T @ (wanted - scaled @ found)
        pull[free | (scale == 0.0)] = 0.0
        best = int(np.argmax(pull))
        if pull[best] <= _TOLERANCE:
            break
        free[best] = True
        found = _step_back(scaled, wanted, found, free)
    return found / np.where(scale > 0.0, scale, 1.0)


def _step_back(table: Floats, wanted: Floats, found: Floats, free: Flags) -> Floats:
    """Solve over the free unknowns; while one is negative, go as far as none is, and fix it."""
    while free.any():
        solved = np.zeros_like(found)
        solved[free] = np.linalg.lstsq(table[:, free], wanted, rcond=None)[0]
        negative = free & (solved <= 0.0)
        if not negative.any():
            return solved
        shares = found[negative] / np.maximum(found[negative] - solved[negative], 1e-300)
        found = found + shares.min() * (solved - found)
        free &= found > 1e-15
        found[~free] = 0.0
    return np.zeros_like(found)
