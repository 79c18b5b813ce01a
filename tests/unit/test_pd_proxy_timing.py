"""What the proxy takes for a token, a length and a failure in the events of a stream."""

import json
from typing import Any

import pytest

from kvxfer.pd.proxy.metrics import Metrics
from kvxfer.pd.proxy.sse import event
from kvxfer.pd.proxy.timing import AnswerTimes

ROLE = {"role": "assistant", "content": ""}


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


def counted(*chunks: object) -> dict[str, float]:
    """The figures after one stream of these chunks."""
    metrics = Metrics([])
    times = AnswerTimes(metrics)
    for chunk in chunks:
        times.see(event(json.dumps(chunk).encode()))
    times.end(is_whole=True)
    lines = (line.rpartition(" ") for line in metrics.page().splitlines())
    values = {name: float(value) for name, _, value in lines if not name.startswith("#")}
    return {
        "ttft": values["kvxfer_proxy_time_to_first_token_seconds_count"],
        "itl": values["kvxfer_proxy_inter_token_latency_seconds_count"],
        "first_gap": values["kvxfer_proxy_first_gap_seconds_count"],
        "output": values["kvxfer_proxy_output_tokens_sum"],
        "prompt": values["kvxfer_proxy_prompt_tokens_sum"],
    }


@pytest.mark.parametrize(
    "token",
    [
        delta(content="x"),
        delta(content=""),  # half a character
        delta(reasoning="x"),
        delta(role="assistant", content="x"),
        delta(role="assistant", content=None, reasoning_content="x"),
        delta(role="assistant", tool_calls=[{"index": 0, "function": {"arguments": "x"}}]),
        delta(content=[{"type": "text", "text": "x"}]),
        {"choices": [{"text": "x"}]},
        {"choices": [{"text": ""}]},
    ],
    ids=json.dumps,
)
def test_what_holds_output_is_a_token(token: object) -> None:
    found = counted(delta(**ROLE), token, token, token)
    assert found == {"ttft": 1, "itl": 2, "first_gap": 1, "output": 3, "prompt": 0}


@pytest.mark.parametrize(
    "other",
    [
        delta(**ROLE),
        delta(role="assistant"),
        delta(role="assistant", content=None, tool_calls=[]),
        delta(),
        delta(content=None),
        {"choices": []},
        {"choices": None},
        {"usage": {"prompt_tokens": 3}},
        {"choices": [], "prompt_token_ids": [1]},
        {"choices": 5},
        [],
        "x",
    ],
    ids=json.dumps,
)
def test_what_holds_none_is_no_token(other: object) -> None:
    assert counted(other, other)["ttft"] == 0
    assert counted(other, delta(content="x"), other, delta(content="y"))["itl"] == 1


@pytest.mark.parametrize(
    ("usage", "lengths"),
    [
        (None, (1, 0)),
        ({"prompt_tokens": 7, "completion_tokens": 5}, (5, 7)),
        ({"prompt_tokens": None, "completion_tokens": None}, (1, 0)),
        ({"prompt_tokens": "7", "completion_tokens": -1}, (1, 0)),
        ("odd", (1, 0)),
    ],
)
def test_odd_usage_does_not_hide_a_token(usage: object, lengths: tuple[int, int]) -> None:
    found = counted({**delta(content="x"), "usage": usage})
    assert (found["ttft"], found["output"], found["prompt"]) == (1, *lengths)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"message": "KV load failed", "code": 500}, 500),
        ({"message": "no", "code": 400}, 400),
        ({"message": "no", "code": 200}, 500),
        ({"message": "no"}, 500),
        ("no", 500),
        (None, None),
    ],
)
def test_an_error_event_is_a_failure(error: object, status: int | None) -> None:
    times = AnswerTimes(Metrics([]))
    times.see(event(json.dumps({"error": error, "choices": []}).encode()))
    assert times.error_status == status
