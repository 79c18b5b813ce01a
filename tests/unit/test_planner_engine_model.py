"""Costs of steps: their formula, their file, and the fit that finds them again."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_models import engine_model, step_model

from kvxfer.errors import InvalidUsage
from kvxfer.pd.planner import StepRow, fit_steps, load_engine
from kvxfer.pd.planner.engine_model import DecodePoint, pairs_of, save_engine
from kvxfer.pd.planner.fitting import non_negative_least_squares
from kvxfer.pd.planner.simulation.costs import StepCosts

TRUE = step_model(
    decode=[DecodePoint(1, 4e-3), DecodePoint(8, 5e-3), DecodePoint(64, 9e-3)],
    context_s=30e-9,
    prefill_base_s=6e-3,
    token_s=18e-6,
    pair_s=0.2e-9,
)


def row(batch: int, context: int, chunk: int = 0, before: int = 0) -> StepRow:
    work = {
        "num_decoding": batch,
        "num_context_tokens": batch * context,
        "num_prompt_tokens": chunk,
        "num_pairs": pairs_of(chunk, before),
    }
    return StepRow(step_s=TRUE.step_s(**work), **work)


ROWS = [
    *(row(batch, context) for batch in (1, 8, 32, 64) for context in (256, 4096)),
    *(row(0, 0, chunk) for chunk in (128, 1024, 4096, 8192)),
    row(8, 1024, 2048, before=2048),
]


def test_a_step_costs_what_the_formula_says() -> None:
    assert TRUE.step_s(num_decoding=36) == pytest.approx(7e-3)  # half way from 8 to 64
    assert TRUE.step_s(num_decoding=1, num_context_tokens=1000) == pytest.approx(4.03e-3)
    assert TRUE.step_s(num_decoding=120) == pytest.approx(13e-3)  # on with the last slope
    # a chunk brings its own base in place of d(0); 100 tokens after 50 make 100 * 100.5 pairs
    assert pairs_of(100, 50) == 100 * 50 + 100 * 101 / 2
    step_s = TRUE.step_s(num_decoding=8, num_prompt_tokens=100, num_pairs=pairs_of(100, 50))
    assert step_s == pytest.approx(6e-3 + 1.8e-3 + 0.2e-9 * 10_050 + 1e-3)


def test_chunks_of_a_prompt_cost_its_pairs_once() -> None:
    whole = pairs_of(8192, 0)
    assert sum(pairs_of(2048, at * 2048) for at in range(4)) == whole
    assert TRUE.prefill_s(8192, 2048) == pytest.approx(TRUE.prefill_s(8192, 8192) + 3 * 6e-3)


@given(batch=st.integers(0, 200), context=st.integers(0, 10**6), chunk=st.integers(0, 10**5))
def test_the_table_of_the_simulation_says_the_same(batch: int, context: int, chunk: int) -> None:
    pairs = pairs_of(chunk, 10)
    fast = StepCosts(TRUE, 200).step_s(batch, context, chunk, pairs)
    slow = TRUE.step_s(
        num_decoding=batch, num_context_tokens=context, num_prompt_tokens=chunk, num_pairs=pairs
    )
    assert fast == pytest.approx(slow)


def test_the_fit_finds_the_costs_that_made_the_rows() -> None:
    found = fit_steps(ROWS, tp_size=1, request_s=1e-3, kv_capacity_tokens=5)
    for batch in (1, 8, 20, 64):
        assert found.decode_s(batch) == pytest.approx(TRUE.decode_s(batch), rel=1e-6)
    for name in ("context_s", "prefill_base_s", "token_s", "pair_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert (found.request_s, found.kv_capacity_tokens) == (1e-3, 5)
    assert found.residual is not None
    assert found.residual.worst < 1e-9
    assert found.measured.num_decoding == 64
    assert found.measured.num_context_tokens == 64 * 4096
    assert found.measured.num_prompt_tokens == 8192


def test_a_sum_of_steps_alike_fits_as_they_do() -> None:
    summed = [
        StepRow(
            step_s=one.step_s * 3,
            num_decoding=one.num_decoding * 3,
            num_context_tokens=one.num_context_tokens * 3,
            num_prompt_tokens=one.num_prompt_tokens * 3,
            num_pairs=one.num_pairs * 3,
            num_steps=3,
            longest_prompt_tokens=int(one.num_prompt_tokens),
        )
        for one in ROWS
    ]
    plain, found = fit_steps(ROWS, tp_size=1), fit_steps(summed, tp_size=1)
    assert found.measured == plain.measured
    assert found.token_s == pytest.approx(plain.token_s, rel=1e-6)


def test_the_residual_shows_rows_that_do_not_fit() -> None:
    off = slower(ROWS[0], step_s=ROWS[0].step_s * 1.5)
    found = fit_steps([*ROWS, off], tp_size=1)
    assert found.residual is not None
    assert found.residual.worst > 0.1


def slower(one: StepRow, step_s: float) -> StepRow:
    return StepRow(step_s, one.num_decoding, one.num_context_tokens)


def test_a_fit_needs_both_kinds_of_rows() -> None:
    decodes = [one for one in ROWS if not one.num_prompt_tokens]
    prefills = [one for one in ROWS if one.num_prompt_tokens]
    with pytest.raises(InvalidUsage, match="no row with prompt tokens"):
        fit_steps(decodes, tp_size=1)
    with pytest.raises(InvalidUsage, match="no row without prompt tokens"):
        fit_steps(prefills, tp_size=1)
    with pytest.raises(InvalidUsage, match="no time"):
        fit_steps([*ROWS, StepRow(0.0, 1)], tp_size=1)


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_least_squares_meet_the_conditions_of_their_optimum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table, wanted = rng.normal(size=(12, 5)), rng.normal(size=12)
    found = non_negative_least_squares(table, wanted)
    pull = table.T @ (wanted - table @ found)
    assert (found >= 0.0).all()
    assert (pull <= 1e-7).all()  # no cost that would lower the error by rising
    assert np.abs(pull[found > 1e-9]).max(initial=0.0) < 1e-7


def test_an_engine_is_written_and_read(tmp_path: Path) -> None:
    engine = engine_model(TRUE, step_model(tp_size=4), first_tokens_together=True)
    save_engine(tmp_path / "engine.json", engine)
    assert load_engine(tmp_path / "engine.json") == engine
    assert engine.at_tp(4).tp_size == 4
    with pytest.raises(InvalidUsage, match="TP 2, only for 1, 4"):
        engine.at_tp(2)


@pytest.mark.parametrize(
    ("part", "instead"),
    [
        (b"kvxfer.pd.engine/1", b"kvxfer.pd.engine/2"),
        (b'"tp_size": 1', b'"tp_size": 0'),
        (b'"token_s": 0.000018', b'"token_s": -1'),
        (b'"num_sequences": 8', b'"num_sequences": 99'),
        (b'"step_s": 0.009', b'"step_s": 0.001'),
        (b'"jitter": []', b'"jitter": [0.0]'),
        (b'"decode": [', b'"decode": ['[:-1]),
    ],
)
def test_a_file_that_is_no_engine_is_refused(tmp_path: Path, part: bytes, instead: bytes) -> None:
    path = tmp_path / "engine.json"
    save_engine(path, engine_model(TRUE))
    content = path.read_bytes()
    if part not in content:  # numbers are written as the encoder likes them
        content = content.replace(b'"token_s": 1.8e-05', b'"token_s": 0.000018')
    assert part in content
    path.write_bytes(content.replace(part, instead, 1))
    with pytest.raises(InvalidUsage, match="not an engine's figures"):
        load_engine(path)


def test_a_step_of_no_time_is_refused() -> None:
    with pytest.raises(InvalidUsage, match="no time"):
        msgspec.structs.replace(TRUE, prefill_base_s=0.0, token_s=0.0, pair_s=0.0)
