"""Streams of events, pages of metrics and bodies, as bytes."""

import json
from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ProtocolMismatch
from kvxfer.pd.proxy import sse
from kvxfer.pd.proxy.body import Body, Unclear, read_body, write_body
from kvxfer.pd.proxy.failure import Failure
from kvxfer.pd.proxy.lmcache_body import why_not_continued
from kvxfer.pd.proxy.prometheus import Counter, Gauge, Histogram, exposition
from kvxfer.pd.proxy.rewriting import alone_body, decode_fields, prefill_fields, why_alone


def body(is_chat: bool = False, **fields: Any) -> Body:
    return read_body(json.dumps(fields).encode(), is_chat=is_chat)


@given(
    datas=st.lists(st.binary(min_size=1).filter(lambda it: not {10, 13} & {*it}), max_size=5),
    cuts=st.lists(st.integers(0, 400), max_size=9),
    end=st.sampled_from([b"\n", b"\r\n"]),
)
def test_events_come_out_whole_however_they_are_cut(
    datas: list[bytes], cuts: list[int], end: bytes
) -> None:
    stream = b"".join(b": a comment" + end + b"data: " + it + end + end for it in datas)
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    reader = sse.EventReader()
    pieces = [stream[start:stop] for start, stop in pairwise(places)]
    assert [it for piece in pieces for it in reader.feed(piece)] == datas


def test_lines_of_data_are_one_event_and_other_fields_are_none() -> None:
    reader = sse.EventReader()
    assert list(reader.feed(b"id: 1\ndata:a\ndata: b\n\nevent: x\n\n\n")) == [b"a\nb"]


@pytest.mark.parametrize("piece", [b"data: x", b"data: x\n"])
def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, piece: bytes) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    reader = sse.EventReader()
    with pytest.raises(ProtocolMismatch, match="above 1000 bytes"):
        list(chain.from_iterable(reader.feed(piece) for _ in range(2000)))


def test_a_page_of_metrics_is_prometheus_text() -> None:
    counter = Counter("a_total", "Of a.", ("kind",))
    counter.add('odd "\\\n')
    counter.add("even", by=2)
    counter.add("even")
    histogram = Histogram("b_seconds", "Of b.", (0.1, 1))
    for value in (0.05, 0.1, 0.5, 9):
        histogram.observe(value)
    gauge = Gauge("c", "Of c.", (), lambda: [((), 1.5)])
    assert exposition([counter, histogram, gauge, Counter("d_total", "Of d.")]).splitlines() == [
        "# HELP a_total Of a.",
        "# TYPE a_total counter",
        r'a_total{kind="odd \"\\\n"} 1',
        'a_total{kind="even"} 3',
        "# HELP b_seconds Of b.",
        "# TYPE b_seconds histogram",
        'b_seconds_bucket{le="0.1"} 2',
        'b_seconds_bucket{le="1"} 3',
        'b_seconds_bucket{le="+Inf"} 4',
        "b_seconds_sum 9.65",
        "b_seconds_count 4",
        "# HELP c Of c.",
        "# TYPE c gauge",
        "c 1.5",
        "# HELP d_total Of d.",
        "# TYPE d_total counter",
        "d_total 0",
    ]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = ["prompt", "n", "stream", "max_tokens", "stop", "seed", "logprobs", "min_tokens", "echo"]


@given(st.dictionaries(st.sampled_from(NAMES), VALUES), st.booleans())
def test_any_body_is_either_split_or_has_a_reason(fields: dict[str, Any], is_chat: bool) -> None:
    asked = body(is_chat, **fields)
    for why in (why_alone, why_not_continued):
        reason = why(asked)
        assert reason is None or reason.replace("_", "").isalpha()
    legs = (prefill_fields(asked, {"a": 1}), decode_fields(asked, {"a": 1}))
    prefill, decode = (json.loads(write_body(leg)) for leg in legs)
    assert {**decode, "kv_transfer_params": None} == {
        **json.loads(asked.raw), "kv_transfer_params": None,
    }  # fmt: skip
    assert (prefill["max_tokens"], prefill["stream"], prefill["n"]) == (1, False, 1)


def test_a_body_that_goes_alone_is_the_client_s_byte_for_byte() -> None:
    odd = b'{ "prompt" : [1],  "x": 1.50 }'
    assert alone_body(read_body(odd, is_chat=False)) is odd
    told = read_body(b'{"x": 1.50, "kv_transfer_params": {"a": 1}}', is_chat=False)
    assert alone_body(told) == b'{"x":1.50}'
    told = read_body(b'{"x": 1.50, "ec_transfer_params": {"a": 1}}', is_chat=False)
    assert alone_body(told) == b'{"x":1.50}'


@pytest.mark.parametrize("logprobs", [{"logprobs": 2}, {"logprobs": True, "top_logprobs": 3}])
def test_a_prefill_has_no_field_whose_condition_it_lacks(logprobs: dict[str, Any]) -> None:
    asked = body(prompt=[1, 2], messages=[], logprob_token_ids=[5, 6], **logprobs)
    assert why_alone(asked) is None
    fields = prefill_fields(asked, {})
    assert not {*logprobs, "logprob_token_ids"} & {*fields}
    assert bytes(decode_fields(asked, {})["logprob_token_ids"]) == b"[5, 6]"


def test_a_chat_that_echoes_has_log_probabilities_of_its_prompt() -> None:
    assert why_alone(body(is_chat=True, messages=[], echo=True)) == "echo_logprobs"
    assert why_alone(body(prompt=[1, 2], echo=True)) is None
    assert why_alone(body(prompt=[1, 2], echo=True, logprobs=1)) == "echo_logprobs"


def test_completions_that_use_a_chat_s_field_still_prefill_one_token() -> None:
    fields = prefill_fields(body(prompt=[1, 2], max_completion_tokens=50), {})
    assert (bytes(fields["max_tokens"]), bytes(fields["max_completion_tokens"])) == (b"1", b"1")


@pytest.mark.parametrize("value", ["1", 1.0, True, [1], 10**80])
def test_a_number_is_a_whole_number_or_unclear(value: object) -> None:
    with pytest.raises(Unclear):
        body(n=value).number("n", 1)


def test_the_last_of_two_fields_of_a_name_holds_as_for_the_engines() -> None:
    assert read_body(b'{"n": 1, "n": 2}', is_chat=False).number("n", 1) == 2


def test_what_is_no_object_is_refused_with_a_reason() -> None:
    with pytest.raises(Failure, match="not a JSON object"):
        read_body(b"[]", is_chat=False)
