"""A decode step from messages that come one by one, late and together, or several tokens each."""

import pytest
from planner_engines import KnownEngine, VirtualAsk

from kvxfer.errors import InvalidUsage
from kvxfer.pd.planner.decode_gaps import decode_gaps
from kvxfer.pd.planner.fit_check import fitted_rows, misfits
from kvxfer.pd.planner.fitting import StepRow
from kvxfer.pd.planner.profile_live import ProfilePlan, profile
from kvxfer.pd.planner.profile_streams import Stream

STEP_S = 10e-3
PLAN = ProfilePlan(prompts=(128, 512, 2048), batches=(1, 2, 4), contexts=(128, 2048))
READ_S = 70e-3


def steady(num_tokens: int, *, start_s: float = 0.0) -> Stream:
    return Stream(start_s, tuple(start_s + STEP_S * (1 + at) for at in range(num_tokens)))


def read_late(stream: Stream, every_s: float = READ_S) -> Stream:
    """The same as a client sees it that looks only every so often, message after message."""
    times_s = []
    for at, token_s in enumerate(stream.tokens_s):
        read_s = -(-token_s // every_s) * every_s
        times_s.append(read_s + 1e-6 * at)
    return Stream(stream.sent_s, tuple(times_s))


class LateAsk(VirtualAsk):
    """An engine whose client is kept busy by others."""

    def __call__(self, count: int, isl: int, osl: int) -> list[Stream]:
        return [read_late(one) for one in super().__call__(count, isl, osl)]


def test_messages_one_by_one_are_steps() -> None:
    seen = decode_gaps([steady(33), steady(33, start_s=0.05)], 33)
    assert seen is not None
    assert seen.step_s == pytest.approx(STEP_S)
    assert seen.joined == 0.0
    assert seen.are_of_steps


def test_messages_that_came_together_still_tell_the_step() -> None:
    streams = [read_late(steady(65, start_s=start_s)) for start_s in (0.0, 0.013, 0.021)]
    seen = decode_gaps(streams, 65)
    assert seen is not None
    assert seen.step_s == pytest.approx(STEP_S, rel=0.15)
    assert not seen.are_of_steps


def test_messages_of_several_tokens_are_counted_as_such() -> None:
    half = Stream(0.0, steady(64).tokens_s[1::2])
    seen = decode_gaps([half], 64)
    assert seen is not None
    assert seen.step_s == pytest.approx(STEP_S, rel=0.02)


def test_one_read_of_all_tells_no_step() -> None:
    assert decode_gaps([read_late(steady(33), 10.0)], 33) is None
    assert decode_gaps([steady(2)], 2) is None


def test_a_busy_client_does_not_make_decoding_free() -> None:
    known = KnownEngine(decode_s=10e-3)
    found = profile(LateAsk(known), PLAN)
    (warning,) = found.warnings
    assert warning.startswith("messages came together in 6 of 6 loads (")
    steps = found.fit(1)
    step_s = steps.step_s(num_decoding=1, num_context_tokens=144)
    assert step_s == pytest.approx(10.1e-3, rel=0.2)
    assert steps.jitter == []
    assert not found.first_tokens_together


def test_streams_that_are_held_up_whole_are_refused() -> None:
    class Held(VirtualAsk):
        def __call__(self, count: int, isl: int, osl: int) -> list[Stream]:
            return [read_late(one, 100.0) for one in super().__call__(count, isl, osl)]

    with pytest.raises(InvalidUsage, match="all messages came at once"):
        profile(Held(KnownEngine()), PLAN)


def test_a_fit_that_is_far_off_is_said_and_assumed_rows_are_not_judged() -> None:
    found = profile(VirtualAsk(KnownEngine()), PLAN)
    steps = found.fit(1)
    assert misfits(fitted_rows(steps, found.rows)) == ""
    off = StepRow(97.8e-3, num_prompt_tokens=512, longest_prompt_tokens=512)
    said = misfits(fitted_rows(steps, [*found.rows, off]))
    assert said.startswith("1 of 10 measured steps are fitted more than 30% off, the worst -8")
    assert "(prompt of 512 tokens)" in said
    assumed = StepRow(97.8e-3, num_prompt_tokens=1, is_assumed=True)
    assert misfits(fitted_rows(steps, [*found.rows, assumed])) == ""
