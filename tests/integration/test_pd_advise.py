"""`kvxfer pd advise` beside a real proxy in front of engines that are paced."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pd_proxies import CHAT, COMPLETIONS, MESSAGES, PROMPT, Setup, run, serving, until_true
from waiting import eventually

from kvxfer.cli.main import main
from kvxfer.pd.advise.advice import advise
from kvxfer.pd.advise.observation import Observation
from kvxfer.pd.advise.reading import watch
from kvxfer.pd.advise.targets import parse_targets

STREAM = {"stream": True, "ignore_eos": True}


async def watched(
    setup: Setup, body: dict[str, Any] | None, path: str = COMPLETIONS
) -> Observation:
    """An interval in which one request comes and ends, or none."""
    begun, asked = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def sleep(_: float) -> None:
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(asked.wait(), loop).result(60.0)

    reading = asyncio.ensure_future(asyncio.to_thread(watch, setup.url, 1.0, sleep=sleep))
    await begun.wait()
    if body is not None:
        reply = await setup.ask({"model": "m", **body}, path)
        assert reply.status == 200
        await setup.settled()
    asked.set()
    return await reading


@pytest.mark.parametrize("connector", ["kvxfer", "nixl", "lmcache", "lmcache-together"])
def test_a_stream_is_counted_token_by_token(connector: str) -> None:
    async def test() -> None:
        async with serving(connector=connector) as setup:
            setup.prefill[0].prefill_s = 0.3
            setup.decode[0].step_s = 0.2  # more than is asked for: chunks may come together
            seen = await watched(setup, {"prompt": PROMPT, "max_tokens": 6, **STREAM})
            assert seen.connector == connector
            assert (seen.prompt_tokens, seen.output_tokens) == (len(PROMPT), 6)
            counts = {key: one.count for key, one in seen.histograms.items() if one is not None}
            assert counts == {
                "ttft": 1, "first_gap": 1, "itl": 5, "tpot": 1, "e2el": 1, "prompt": 1,
                "output": 1, "prefill": 1,
            }  # fmt: skip
            ttft, itl = seen.histograms["ttft"], seen.histograms["itl"]
            assert ttft is not None
            assert itl is not None
            assert ttft.mean >= 0.3
            assert itl.mean >= 0.04
            prefill, decode = seen.stage("prefill"), seen.stage("decode")
            assert prefill is not None
            assert decode is not None
            assert prefill.in_flight * seen.seconds >= 0.3
            assert decode.in_flight * seen.seconds >= 0.2
            found = advise(seen, parse_targets("ttft:p99:250,itl:p50:60000"))
            assert [one.verdict for one in found.judged] == ["broken", "holds"]

    run(test())


def test_a_chat_s_opening_is_no_token() -> None:
    async def test() -> None:
        async with serving() as setup:
            setup.decode[0].step_s = 0.2
            body = {"messages": MESSAGES, "max_tokens": 3, **STREAM}
            seen = await watched(setup, body, CHAT)
            itl = seen.histograms["itl"]
            assert itl is not None
            assert itl.count == 2
            assert any("estimated from their bytes" in text for text in seen.remarks)

    run(test())


def test_usage_goes_before_what_was_counted() -> None:
    async def test() -> None:
        async with serving() as setup:
            setup.decode[0].tokens_per_chunk = 4
            body = {"prompt": "once upon a time", "max_tokens": 8, **STREAM}
            with_usage = {**body, "stream_options": {"include_usage": True}}
            assert (await watched(setup, body)).output_tokens == 2  # chunks
            seen = await watched(setup, with_usage)
            assert seen.output_tokens == 8
            assert seen.remarks == ()

    run(test())


def test_whole_answers_and_idle_proxies_have_no_first_token() -> None:
    async def test() -> None:
        async with serving() as setup:
            seen = await watched(setup, {"prompt": PROMPT, "max_tokens": 3})
            assert seen.requests_per_s > 0
            found = advise(seen, parse_targets("ttft:p99:500,e2el:p99:60000"))
            assert [one.verdict for one in found.judged] == ["idle", "holds"]
            assert found.outcome == "unclear"
            assert any("1 answers were not streamed" in text for text in found.remarks)
            idle = advise(await watched(setup, None), parse_targets("ttft:p99:500"))
            assert idle.outcome == "idle"

    run(test())


@pytest.mark.parametrize("connector", ["kvxfer", "lmcache"])
def test_a_stream_that_ends_with_an_error_is_in_no_percentile(connector: str) -> None:
    async def test() -> None:
        async with serving(connector=connector) as setup:
            setup.decode[0].fails_after = 3
            seen = await watched(setup, {"prompt": PROMPT, "max_tokens": 9, **STREAM})
            assert seen.num_failed == 1
            counts = {key: one.count for key, one in seen.histograms.items() if one is not None}
            assert counts.pop("prefill") == 1
            assert set(counts.values()) == {0}
            found = advise(seen, parse_targets("ttft:p99:60000,e2el:p99:60000"))
            assert found.outcome != "holds"

    run(test())


def test_a_stream_whose_client_left_counts_as_far_as_it_was_seen() -> None:
    async def test() -> None:
        async with serving() as setup:
            setup.decode[0].pace = asyncio.Semaphore(2)
            body = {"prompt": PROMPT, "max_tokens": 9, **STREAM}
            async with setup.session.post(setup.url + COMPLETIONS, json=body) as response:
                while b"data" not in await response.content.readany():
                    pass
            await setup.settled()
            name = "kvxfer_proxy_time_to_first_token_seconds_count"
            assert await setup.metric(name) == 1
            assert await setup.metric("kvxfer_proxy_e2e_latency_seconds_count") == 0

    run(test())


def test_an_engine_that_is_down_is_told() -> None:
    async def test() -> None:
        async with serving(num_prefill=2) as setup:
            await setup.prefill[1].stop()

            async def is_down() -> bool:
                return await setup.metric("kvxfer_proxy_engine_up", role="prefill") == 1

            await until_true(is_down)
            seen = await watched(setup, {"prompt": PROMPT, "max_tokens": 3, **STREAM})
            stage = seen.stage("prefill")
            assert stage is not None
            assert (stage.num_engines, stage.num_down) == (1, 1)

    run(test())


def test_the_command_judges_and_predicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_answers = 0

    def sleep(_: float) -> None:
        """As long as it takes to answer some."""
        enough = num_answers + 3
        eventually(lambda: num_answers >= enough, "nobody is answered")

    async def test() -> None:
        async with serving() as setup:
            words = ["pd", "advise", "--metrics", setup.url, "--interval", "1.5"]

            async def advised(slo: str, *more: str) -> int:
                nonlocal num_answers
                told = asyncio.to_thread(main, [*words, "--slo", slo, *more])
                command = asyncio.ensure_future(told)
                while not command.done():
                    await setup.ask({"prompt": PROMPT, "max_tokens": 6, **STREAM})
                    num_answers += 1
                    await asyncio.sleep(0.05)
                return await command

            monkeypatch.setattr("kvxfer.cli.pd.advise.watch", partial(watch, sleep=sleep))

            assert await advised("ttft:p99:300000,itl:p99:300000") == 0
            assert "The SLO holds" in capsys.readouterr().out
            path = tmp_path / "advice.json"
            records = ("--engine", "llama-3.1-8b-h200", "--model", "llama-3.1-8b")
            assert await advised("ttft:p99:0.001", *records, "--json", str(path)) == 1
            out = capsys.readouterr().out
            assert "The SLO is broken" in out
            assert "predicted at this load" in out
            record = json.loads(path.read_text())
            assert record["outcome"] == "broken"
            assert "transfers take no time: no sweep was given" in record["present"]["uncovered"]
            monkeypatch.undo()
            assert await asyncio.to_thread(main, [*words, "--slo", "ttft:p99:500"]) == 3
            assert "ask again under load" in capsys.readouterr().out

    run(test())


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--slo", "ttft:500"], 2),
        (["--slo", "ttft:p99:500", "--interval", "0"], 2),
        (["--slo", "ttft:p99:500", "--engine", "llama-3.1-8b-h200"], 2),
        (["--slo", "ttft:p99:500", "--sweep", "x.json"], 2),
        (["--slo", "ttft:p99:500", "--interval", "0.01"], 3),
    ],
)
def test_what_cannot_be_done_is_refused(words: list[str], status: int) -> None:
    assert main(["pd", "advise", "--metrics", "http://127.0.0.1:1", *words]) == status
