"""Traces: what readers take and refuse, and loads that are made."""

import json
import os
import threading
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from kvxfer.errors import InvalidUsage
from kvxfer.pd.planner import Request, Trace
from kvxfer.pd.planner.traces import (
    _lines,
    closed_loop,
    open_loop,
    read_azure,
    read_mooncake,
    read_trace,
    read_vllm,
)

MOONCAKE = (
    '{"timestamp": 3000, "input_length": 700, "output_length": 0, "hash_ids": [0, 7]}\n'
    '{"timestamp": 0, "input_length": 512, "output_length": 5, "hash_ids": [0]}\n\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
)


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_mooncake_counts_milliseconds_and_is_sorted(tmp_path: Path) -> None:
    trace = read_mooncake(write(tmp_path, MOONCAKE))
    assert trace.requests == (Request(0.0, 512, 5, (0,)), Request(3.0, 700, 1, (0, 7)))
    assert (trace.hash_tokens, trace.concurrency) == (512, None)


def test_vllm_counts_seconds_and_blocks_of_16(tmp_path: Path) -> None:
    line = {"timestamp": 1.5, "input_length": 20, "output_length": 3, "hash_ids": [4, 5]}
    trace = read_vllm(write(tmp_path, json.dumps(line)))
    assert trace.requests == (Request(1.5, 20, 3, (4, 5)),)
    assert trace.hash_tokens == 16


def test_azure_starts_at_zero_and_keeps_seven_digits(tmp_path: Path) -> None:
    first, second = read_azure(write(tmp_path, AZURE)).requests
    assert (first.arrival_s, first.num_prompt_tokens, first.num_output_tokens) == (0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-6)


def test_azure_s_time_stamps_may_have_a_zone(tmp_path: Path) -> None:
    header = AZURE.splitlines()[0]
    stamps = (
        "2024-05-10 00:00:00.009930+00:00",
        "2024-05-10T00:00:01Z",
        "2024-05-10 02:00:02.5+02:00",
        "2024-05-10 00:00:03",
    )
    trace = read_azure(write(tmp_path, "\n".join([header, *(f"{one},5,6" for one in stamps)])))
    arrivals_s = [one.arrival_s for one in trace.requests]
    assert arrivals_s == pytest.approx([0.0, 0.99007, 2.49007, 2.99007], abs=1e-6)


@pytest.mark.parametrize("text", [MOONCAKE, AZURE])
def test_a_mark_of_utf8_is_passed_over(tmp_path: Path, text: str) -> None:
    assert len(read_trace(write(tmp_path, "\ufeff" + text)).requests) == 2


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(AZURE,))
    writer.start()
    assert len(read_trace(tmp_path / "pipe").requests) == 2
    writer.join(10.0)


@pytest.mark.parametrize("form", ["mooncake", "azure"])
def test_of_a_long_trace_the_first_requests_are_taken(
    form: Literal["mooncake", "azure"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_lines, "MAX_REQUESTS", 3)
    head, line = AZURE.splitlines()[:2]
    if form == "mooncake":
        head, line = "", '{"timestamp": 0, "input_length": 5, "output_length": 3}'
    path = write(tmp_path, "\n".join([head, line, line, "", line]))
    assert len(read_trace(path, form=form).requests) == 3
    path = write(tmp_path, "\n".join([head, line, line, line, line, "not read"]))
    with pytest.raises(InvalidUsage, match=r"more than 3 requests.*--most-requests"):
        read_trace(path, form=form)
    assert len(read_trace(path, form=form, most_requests=2).requests) == 2


def test_what_is_beyond_the_first_requests_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, AZURE)
    monkeypatch.setattr(_lines, "MAX_TRACE_BYTES", len(AZURE) - 1)
    with pytest.raises(InvalidUsage, match="larger than"):
        read_trace(path)
    assert len(read_trace(path, most_requests=1).requests) == 1


@pytest.mark.parametrize(
    ("text", "hash_tokens"),
    [
        (MOONCAKE, 512),
        (AZURE, 512),
        ('{"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [4, 5]}', 16),
    ],
)
def test_the_format_is_told_by_the_first_line(tmp_path: Path, text: str, hash_tokens: int) -> None:
    assert read_trace(write(tmp_path, text)).hash_tokens == hash_tokens


def test_a_trace_can_be_cut_and_sped_up(tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE)
    assert read_trace(path, speed=2.0).requests[1].arrival_s == 1.5
    assert read_trace(path, most_requests=1).requests == (Request(3.0, 700, 1, (0, 7)),)
    with pytest.raises(InvalidUsage, match="speed is 0"):
        read_trace(path, speed=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\ufeff\n", "is empty"),
        ("hello\n", "no trace that is known"),
        ("[" * 100_000, "no trace that is known"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 3}', "name the format"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        read_trace(write(tmp_path, text))


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"timestamp": -1, "input_length": 5, "output_length": 3}',
        '{"timestamp": 1e400, "input_length": 5, "output_length": 3}',
        '{"timestamp": 0, "input_length": 0, "output_length": 3}',
        '{"timestamp": 0, "input_length": 5, "output_length": 99999999999}',
        '{"timestamp": 0, "input_length": 5, "output_length": -1}',
        '{"timestamp": 0, "input_length": "5", "output_length": 3}',
        '{"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": [1.5]}',
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    good = '{"timestamp": 0, "input_length": 5, "output_length": 3}\n'
    with pytest.raises(InvalidUsage, match="line 2"):
        read_mooncake(write(tmp_path, good + line))


@pytest.mark.parametrize(
    "line",
    [
        "1,2",
        "yesterday,5,6",
        "2023-11-16 18:15:46.1,x,6",
        "é,1,2",
        "2023-11-16 18:15:46.1,5,-1",
        "2023-11-16 18:15:46.1,1_0_0,6",
        "2023-11-16 18:15:03.5e3,5,6",
        "2023-11-16 18:75:46.1,5,6",
        "2023-11-16 18:15:46.1+00,5,6",
    ],
)
def test_a_wrong_line_of_a_csv_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(InvalidUsage, match="line 4"):
        read_azure(write(tmp_path, AZURE + line))
    with pytest.raises(InvalidUsage, match="does not begin with"):
        read_azure(write(tmp_path, line))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match="is empty"):
        read_mooncake(write(tmp_path, ""))
    with pytest.raises(InvalidUsage, match="is empty"):
        read_vllm(write(tmp_path, "\n\n"))
    with pytest.raises(InvalidUsage, match="has no request"):
        read_azure(write(tmp_path, AZURE.splitlines()[0]))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match="No such file"):
        read_trace(tmp_path / "none")


def test_a_closed_loop_is_ten_rounds() -> None:
    trace = closed_loop(isl=10, osl=3, concurrency=4)
    assert (len(trace.requests), trace.concurrency) == (40, 4)
    assert set(trace.requests) == {Request(0.0, 10, 3)}


def test_an_open_loop_keeps_its_rate_and_its_seed() -> None:
    def waits(burstiness: float, seed: int = 0) -> np.ndarray:
        trace = open_loop(
            isl=1, osl=1, requests_per_s=50.0, num_requests=4000, burstiness=burstiness, seed=seed
        )
        return np.diff([one.arrival_s for one in trace.requests])

    steady, bursty = waits(100.0), waits(0.25)
    assert steady.mean() == pytest.approx(0.02, rel=0.05)
    assert bursty.mean() == pytest.approx(0.02, rel=0.15)
    # the coefficient of variation of a gamma distribution is 1 / sqrt(shape)
    assert steady.std() / steady.mean() == pytest.approx(0.1, rel=0.1)
    assert bursty.std() / bursty.mean() == pytest.approx(2.0, rel=0.2)
    assert (waits(1.0) == waits(1.0)).all()
    assert (waits(1.0) != waits(1.0, seed=1)).any()


@pytest.mark.parametrize("burstiness", [0.25, 1.0])
def test_an_open_loop_sends_all_in_the_time_of_its_rate(burstiness: float) -> None:
    for seed in range(5):
        trace = open_loop(
            isl=1, osl=1, requests_per_s=3.0, num_requests=12, burstiness=burstiness, seed=seed
        )
        # the wait before the first, which the trace leaves out, is the generator's first
        waits = np.random.default_rng(seed).gamma(burstiness, size=12)
        left_out = 1 - waits[0] / waits.sum()
        assert trace.requests[0].arrival_s == 0.0
        assert trace.requests[-1].arrival_s == pytest.approx(12 / 3.0 * left_out)


@pytest.mark.parametrize(
    "make",
    [
        lambda: closed_loop(isl=0, osl=1, concurrency=1),
        lambda: closed_loop(isl=1, osl=1, concurrency=0),
        lambda: closed_loop(isl=1, osl=1, concurrency=1, shared_tokens=2),
        lambda: open_loop(isl=1, osl=1, requests_per_s=0.0, num_requests=1),
        lambda: open_loop(isl=1, osl=1, requests_per_s=1.0, num_requests=0),
        lambda: open_loop(isl=1, osl=1, requests_per_s=1.0, num_requests=1, burstiness=-1.0),
        lambda: Trace("backwards", (Request(1.0, 1, 1), Request(0.0, 1, 1))),
        lambda: Trace("no block", (Request(1.0, 1, 1),), hash_tokens=0),
        lambda: Request(float("nan"), 1, 1),
        lambda: Request(0.0, 1, 0),
    ],
)
def test_numbers_out_of_bounds_are_refused(make) -> None:
    with pytest.raises(InvalidUsage):
        make()
