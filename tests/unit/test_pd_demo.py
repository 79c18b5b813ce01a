"""The hand-over's arithmetic, on answers whose times are known."""

import pytest

from kvxfer.errors import TransferFailed
from kvxfer.pd.client import Answer
from kvxfer.pd.demo import handover
from kvxfer.pd.demo.handover import measure_handover


def answers(
    monkeypatch: pytest.MonkeyPatch, alone_s: list[float], both: list[tuple[float, ...]]
) -> None:
    """The prefill engine answers with these TTFTs, the proxy with TTFT and gaps."""
    alone, through = iter(alone_s), iter(both)

    def complete(url: str, body: dict[str, object], timeout_s: float) -> Answer:
        if url == "prefill":
            assert body["max_tokens"] == 1
            return Answer("x", next(alone), ())
        ttft_s, *gaps_s = next(through)
        return Answer("text", ttft_s, tuple(gaps_s))

    monkeypatch.setattr(handover.client, "complete", complete)


def test_a_hand_over_is_what_two_engines_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first pair is a warm-up: 90 s, which no median may hold.
    answers(
        monkeypatch,
        [90.0, 1.0, 2.0, 3.0],
        [(90.0, 9.0, 9.0), (1.5, 0.3, 0.1, 0.1), (2.25, 0.1, 0.1, 0.1), (3.5, 0.2, 0.1, 0.1)],
    )
    found = measure_handover("front", "prefill", {"max_tokens": 4}, 3)
    assert found.total_s == pytest.approx(0.6)  # of 0.7, 0.25 and 0.6
    assert (found.alone_s, found.ttft_s) == (2.0, 2.25)
    assert (found.first_gap_s, found.gap_s) == (0.2, 0.1)
    assert found.answer.text == "text"


def test_an_answer_without_a_median_gap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, [1.0, 1.0], [(1.0, 0.1, 0.1), (1.0, 0.1)])
    with pytest.raises(TransferFailed, match="third token"):
        measure_handover("front", "prefill", {}, 1)
