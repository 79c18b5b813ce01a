"""The hand-over's arithmetic and its words, on answers whose times are known."""

import pytest

from kvxfer.cli.pd.demo import words
from kvxfer.pd.client import Answer
from kvxfer.pd.demo import handover
from kvxfer.pd.demo.handover import Asked, Handover, measure_handover
from kvxfer.pd.demo.run import Shown

WARM_UP = (90.0, 9.0, 9.0)  # no median may hold it


def answers(
    monkeypatch: pytest.MonkeyPatch,
    alone_s: list[float],
    both: list[tuple[float, ...]],
    num_tokens: int | None = None,
) -> None:
    """The prefill engine answers with these TTFTs, the proxy with TTFT and gaps."""
    alone, through = iter(alone_s), iter(both)

    def complete(url: str, body: dict[str, object], timeout_s: float) -> Answer:
        if url == "prefill":
            assert body["max_tokens"] == 1
            return Answer("x", next(alone), ())
        assert body["stream_options"] == {"include_usage": True}
        ttft_s, *gaps_s = next(through)
        return Answer("text", ttft_s, tuple(gaps_s), num_tokens)

    monkeypatch.setattr(handover.client, "complete", complete)


def test_a_hand_over_is_what_two_engines_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(
        monkeypatch,
        [90.0, 1.0, 2.0, 3.0],
        [WARM_UP, (1.5, 0.3, 0.1, 0.1), (2.25, 0.1, 0.1, 0.1), (3.5, 0.2, 0.1, 0.1)],
    )
    asked = measure_handover("front", "prefill", {"max_tokens": 4}, 3)
    found = asked.handover
    assert found is not None
    assert found.total_s == pytest.approx(0.6)  # of 0.7, 0.25 and 0.6
    assert (found.least_s, found.most_s) == pytest.approx((0.25, 0.7))
    assert (found.alone_s, found.ttft_s) == (2.0, 2.25)
    assert (found.first_gap_s, found.gap_s) == (0.2, 0.1)
    assert asked.answer.text == "text"


@pytest.mark.parametrize("starved", [(1.0,), (1.0, 0.1), (1.0, 0.1, 0.1, 0.1)])
def test_an_answer_whose_tokens_came_together_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, starved: tuple[float, ...]
) -> None:
    timed = (1.5, 0.3, 0.1, 0.1, 0.1)  # five messages of six tokens
    answers(monkeypatch, [1.0] * 4, [WARM_UP, starved, starved, timed], num_tokens=6)
    found = measure_handover("front", "prefill", {}, 1).handover
    assert found is not None
    assert found.total_s == pytest.approx(0.7)


def test_it_is_asked_for_again_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    starved = (1.0, 0.1)
    answers(monkeypatch, [1.0] * 4, [WARM_UP, starved, starved, starved], num_tokens=48)
    asked = measure_handover("front", "prefill", {}, 1)
    assert asked.handover is None
    told = words(Shown("prompt", asked))
    assert "48 tokens came in 2 messages" in told
    assert "answer of the decode engine: 'text'" in told
    assert "hand-over 0" not in told


@pytest.mark.parametrize(
    ("total_s", "least_s", "most_s", "is_told_apart"),
    [
        (0.020, 0.015, 0.030, True),
        (0.020, 0.005, 0.030, False),  # within the spread
        (-0.190, -0.200, -0.150, False),
    ],
)
def test_a_hand_over_within_the_noise_is_said_to_be(
    total_s: float, least_s: float, most_s: float, is_told_apart: bool
) -> None:
    found = Handover(0.3, 0.3, 0.1, 0.1, total_s, least_s, most_s)
    told = words(Shown("prompt", Asked(Answer("text", 0.3, ()), found)))
    assert f"hand-over {total_s * 1e3:.1f} ms" in told
    assert ("not told apart from this machine's noise" in told) is not is_told_apart
