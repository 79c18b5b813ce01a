"""Faults of a measurement: each is planted and has to be seen, and a clean run has none."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pd_runs import Bench, Engines, Result

from kvxfer.pd.analysis import analyse, faults, parse_objectives
from kvxfer.pd.summary import Finding, PointSummary

Spoil = Callable[[Result], None]
OSL = 32


def point_of(folder: Path, spoil: Spoil, *, chat: bool = False, **fields: Any) -> PointSummary:
    bench, engines = Bench(folder), Engines()
    bench.setup("one", engines)
    bench.point("one", engines, 4, isl=1000, osl=OSL, chat=chat, spoil=spoil, **fields)
    (setup,) = analyse(folder, objectives=parse_objectives("ttft:1e6")).setups
    return setup.points[0]


def fail(*indices: int, error: str = "Traceback\nClientError: reset") -> Spoil:
    """As the client writes a request that failed."""

    def spoil(result: Result) -> None:
        for index in indices:
            result["errors"][index] = error
            result["ttfts"][index] = result["latencies"][index] = 0.0
            result["itls"][index], result["output_lens"][index] = [], 0
        result["completed"] -= len(indices)
        result["failed"] += len(indices)

    return spoil


def end_early(result: Result) -> None:
    for index in (3, 5):
        result["latencies"][index] -= sum(result["itls"][index][7:])
        result["itls"][index] = result["itls"][index][:7]
        result["output_lens"][index] = 8


def join_messages(result: Result) -> None:
    """Two messages in one read: no time between them."""
    for gaps in result["itls"]:
        gaps[4], gaps[5] = gaps[4] + gaps[5], 0.0


def join_tokens(result: Result) -> None:
    """Two tokens in one message."""
    result["itls"][2][4:6] = [sum(result["itls"][2][4:6])]


def empty_message(result: Result) -> None:
    gap = result["itls"][2][4]
    result["itls"][2][4:5] = [gap / 2, gap / 2]


def no_token(result: Result) -> None:
    """A reply that the client takes for one, and that says nothing."""
    result["output_lens"][0], result["itls"][0] = 0, []


def change(name: str, value: Callable[[Any], Any]) -> Spoil:
    def spoil(result: Result) -> None:
        result[name] = value(result[name])

    return spoil


def add(amount: float, *indices: int) -> Callable[[list[float]], list[float]]:
    return lambda values: [
        value + amount * (not indices or index in indices) for index, value in enumerate(values)
    ]


PLANTED: list[tuple[str, Spoil, str, bool]] = [
    ("failures", fail(0, 7), "2 of 40 requests failed: ClientError: reset", True),
    ("failures", fail(1, error=""), "1 of 40 requests failed: no token came", True),
    ("failures", no_token, "1 of 40 requests failed: no token came", True),
    ("counts", no_token, "the client counted 40 replies; 39 have tokens", True),
    ("output_lengths", change("output_lens", add(-1)), "every reply is one token short", True),
    ("output_lengths", end_early, "2 of 40 replies ended before their 32 tokens", True),
    ("output_lengths", change("output_lens", add(3, 1)), "1 of 40 replies are longer", True),
    ("prompt_lengths", change("input_lens", add(-20, 0, 1, 2)), "3 of 40 prompts", False),
    ("messages", join_tokens, "1 of 40 replies have messages of several tokens", False),
    ("messages", empty_message, "1 of 40 replies have messages without a token", False),
    ("one_read", join_messages, "40 of 1240 gaps (3.23%) are under 0.1 ms", False),
    ("times_add_up", change("latencies", add(0.05, 9)), "1 of 40 replies do not end", True),
    ("times_add_up", lambda result: result.pop("latencies"), "no `latencies`", False),
    ("in_flight", change("start_times", add(-1.0, 30)), "5 requests at once, 4 were", True),
]


@pytest.mark.parametrize(("check", "spoil", "text", "serious"), PLANTED)
def test_a_planted_fault_is_seen(
    check: str, spoil: Spoil, text: str, serious: bool, tmp_path: Path
) -> None:
    found = [one for one in point_of(tmp_path, spoil).findings if text in one.text]
    assert [one.serious for one in found] == [serious]


def test_requests_that_were_not_recorded_are_missed(tmp_path: Path) -> None:
    def lose(result: Result) -> None:
        for name, values in result.items():
            if isinstance(values, list):
                result[name] = values[:-1]
        result["completed"] -= 1

    assert Finding("39 requests recorded, 40 sent", True) in point_of(tmp_path, lose).findings


@pytest.mark.parametrize(("kind", "counted"), [("prompt", 40_000), ("output", 40 * OSL)])
def test_engines_that_counted_otherwise_are_believed(
    kind: str, counted: int, tmp_path: Path
) -> None:
    name = f"served_{kind}_tokens"
    assert point_of(tmp_path / "same", lambda result: None, **{name: counted}).findings == []
    (found,) = point_of(tmp_path / "other", lambda result: None, **{name: counted + 1}).findings
    assert found.serious
    assert found.text == f"the engines counted {counted + 1} {kind} tokens, usage {counted}"


def test_what_the_run_itself_saw_is_passed_on(tmp_path: Path) -> None:
    found = point_of(tmp_path, lambda result: None, findings=["the server was restarted"]).findings
    assert found == [Finding("the server was restarted", False)]


def test_a_clean_run_has_no_findings(tmp_path: Path) -> None:
    assert point_of(tmp_path, lambda result: None).findings == []


def test_every_check_has_a_planted_fault() -> None:
    planted = {check for check, *_ in PLANTED} | {"served_tokens"}
    assert {check.__name__ for check in faults.CHECKS} == planted
    own = [one for _, one in inspect.getmembers(faults, inspect.isgeneratorfunction)]
    assert set(own) == set(faults.CHECKS)


def test_nothing_is_dropped_but_what_failed(tmp_path: Path) -> None:
    clean = point_of(tmp_path / "clean", lambda result: None)
    for number, spoil in enumerate((join_messages, end_early, empty_message)):
        point = point_of(tmp_path / str(number), spoil)
        assert (point.num_sent, point.num_failed) == (40, 0)
        assert len(point.ttft) == len(clean.ttft)
    failed = point_of(tmp_path / "failed", fail(0, 7))
    assert (failed.num_sent, failed.num_failed, len(failed.ttft)) == (40, 2, 38)
    assert failed.goodput is not None
    assert (failed.goodput.num_good, failed.goodput.num_sent) == (38, 40)
    assert failed.requests_per_s == pytest.approx(clean.requests_per_s * 38 / 40)


# The role that opens each stream of chat completions.


def test_a_role_is_no_first_token(tmp_path: Path) -> None:
    """The role comes 4 ms before the token: TTFT and the first gap are the token's."""

    def early_role(result: Result) -> None:
        result["ttfts"] = [value - 4e-3 for value in result["ttfts"]]
        for gaps in result["itls"]:
            gaps[0] += 4e-3

    plain = point_of(tmp_path / "plain", lambda result: None)
    chat = point_of(tmp_path / "chat", early_role, chat=True)
    for name in ("ttft", "first_gap", "later_gaps", "e2el"):
        wanted, found = getattr(plain, name).values_ms, getattr(chat, name).values_ms
        assert found == pytest.approx(wanted), name
    (finding,) = chat.findings
    assert not finding.serious
    assert "names the role" in finding.text


def test_a_role_is_known_where_later_messages_hold_several_tokens(tmp_path: Path) -> None:
    def pairs(result: Result) -> None:
        result["itls"] = [
            [gaps[0], *map(sum, zip(*[iter(gaps[1:])] * 2, strict=False))]
            for gaps in result["itls"]
        ]
        result["latencies"] = [
            ttft + sum(gaps) for ttft, gaps in zip(result["ttfts"], result["itls"], strict=True)
        ]

    point = point_of(tmp_path, pairs, chat=True)
    assert point.first_gap.percentile(0) > 5.0
    assert [one.text.partition(" replies")[0] for one in point.findings[1:]] == ["40 of 40"]


def test_a_chat_client_that_skips_the_role_loses_no_token(tmp_path: Path) -> None:
    def skip_role(result: Result) -> None:
        result["ttfts"] = [
            ttft + gaps.pop(0) for ttft, gaps in zip(result["ttfts"], result["itls"], strict=True)
        ]

    plain = point_of(tmp_path / "plain", lambda result: None)
    chat = point_of(tmp_path / "chat", skip_role, chat=True)
    assert chat.itl.values_ms == pytest.approx(plain.itl.values_ms)
    assert chat.findings == []
