"""The experiment on batching: its load, who counts as held up, and what it says."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import InvalidUsage, NotAvailable
from kvxfer.pd.analysis.replies import Reply
from kvxfer.pd.experiment_result import Bars, ExperimentResult
from kvxfer.pd.experiments.batching import load_of, recorded
from kvxfer.pd.experiments.batching.blocking import Blocking, held_up
from kvxfer.pd.experiments.batching.shown import Row, figures_of
from kvxfer.pd.experiments.batching.ways import measured_ways, ways_of
from kvxfer.pd.experiments.context import Context
from kvxfer.pd.experiments.options import Options
from kvxfer.pd.experiments.registry import find_experiment
from kvxfer.pd.launch.launcher import Launcher
from kvxfer.pd.load.plan import LoadPlan
from kvxfer.pd.load.replay import read_replay
from kvxfer.pd.planner import Request, Trace
from kvxfer.pd.result import PDSetup, bench_path, save_point, save_setup

LOAD = Blocking(
    short=256, long=8192, osl=64, requests_per_s=16.0, period_s=4.0, num_periods=3
)  # fmt: skip


def no_launcher() -> Launcher:
    raise NotAvailable("a test does not measure")


def simulated(out: Path, **changes: Any) -> ExperimentResult:
    experiment = find_experiment("batching")
    options = experiment.sizes["gpu"]
    load = LoadPlan(
        isl=(256, 8192), osl=(64,), concurrency=(64,), request_rates=(16.0,), duration_s=20.0
    )
    fields = {"model": options.model, "load": load, "engine": options.engine, **changes}
    return experiment.run(
        Context(
            out=out,
            size="gpu",
            options=Options(**fields),
            command=("kvxfer", "pd", "experiment", "batching"),
            make_launcher=no_launcher,
            simulate_only=True,
        )
    )


def row(result: ExperimentResult, name: str) -> dict[str, Any]:
    table = result.tables[0]
    cells = next(cells for cells in table.rows if cells[0] == name)
    return dict(zip((column.name for column in table.columns), cells, strict=True))


def test_long_prompts_come_among_short_ones(tmp_path: Path) -> None:
    trace = read_replay(LOAD.write(tmp_path / "trace.jsonl")).trace
    longs = [one for one in trace.requests if one.num_prompt_tokens > LOAD.threshold]
    shorts = [one for one in trace.requests if one.num_prompt_tokens == LOAD.short]
    assert (len(longs), len(shorts)) == (3, 3 * 64)
    assert [b.arrival_s - a.arrival_s for a, b in pairwise(longs)] == pytest.approx([4.0, 4.0])
    steps_s = [b.arrival_s - a.arrival_s for a, b in pairwise(shorts)]
    assert steps_s == pytest.approx([1 / 16] * len(steps_s), abs=2e-4)
    assert not {one.arrival_s for one in longs} & {one.arrival_s for one in shorts}
    ids = [at for one in trace.requests for at in one.prefix_hashes]
    assert len(ids) == len(set(ids))  # nothing for a prefix cache


@pytest.mark.parametrize(
    "changes", [{"short": 8}, {"short": 9000}, {"osl": 1}, {"requests_per_s": 0.1}]
)
def test_a_load_without_a_meaning_is_refused(changes: dict[str, Any]) -> None:
    fields = {"short": 256, "long": 8192, "osl": 64, "requests_per_s": 16.0, "period_s": 4.0}
    with pytest.raises(InvalidUsage):
        Blocking(**{**fields, "num_periods": 3, **changes})
    with pytest.raises(InvalidUsage, match="finite rate"):
        load_of(Options(load=LoadPlan(isl=(256, 8192))))


def test_who_is_held_up() -> None:
    trace = Trace(
        "t", tuple(Request(at_s, tokens, 3) for at_s, tokens in
                   ((0.0, 10), (1.0, 900), (1.2, 10), (2.0, 10)))
    )  # fmt: skip

    def reply(index: int, ttft_ms: float, *gaps_ms: float) -> Reply:
        return Reply(index, ttft_ms, ttft_ms + sum(gaps_ms), 1 + len(gaps_ms), np.array(gaps_ms))

    # The long prompt is served from 1.0 to 1.5 s.
    replies = [reply(0, 800, 100, 700), reply(1, 500, 9, 9), reply(2, 400, 5), reply(3, 50, 6)]
    sent_s = {0: 7.0, 1: 8.0, 2: 8.2, 3: 9.0}  # another clock
    found = held_up(replies, sent_s, trace, threshold=100)
    assert list(found.ttft.values_ms) == [400]
    assert list(found.calm_ttft.values_ms) == [50, 800]
    assert list(found.gaps.values_ms) == [700]  # 0.9 to 1.6 s
    assert list(found.calm_gaps.values_ms) == [5, 6, 100]
    assert list(found.long_ttft.values_ms) == [500]
    without = held_up(replies[:1], sent_s, trace, threshold=100)
    assert len(without.ttft) == len(without.gaps) == len(without.long_ttft) == 0


def test_every_way_of_vllm_has_its_switches() -> None:
    ways = ways_of(LOAD)
    told = {way.name: way.spec.prefill_args for way in ways if way.spec is not None}
    assert "--no-enable-chunked-prefill" in told["whole prompts"]
    for name, budget in (("chunks of 2048", "2048"), ("chunks of 512", "512")):
        at = told[name].index("--max-num-batched-tokens")
        assert told[name][at + 1] == budget
    assert "--long-prefill-token-threshold" in told["long prompts limited"]
    context = next(word for word in told["whole prompts"] if word.isdigit())
    assert int(context) >= LOAD.long + LOAD.osl
    # Chunks that are off need a step that holds the longest context.
    assert told["whole prompts"][-1] == context
    assert {way.name for way in ways if way.spec is None} == {
        "static", "dynamic", "parallel prefill", "long penalised", "long apart",
    }  # fmt: skip
    extra = measured_ways(ways, Options(prefill_args=("--x",), decode_args=("--y",)))
    for way in extra:
        assert way.spec is not None
        assert way.spec.prefill_args[0] == "--x"
        assert ("--y" in way.spec.decode_args) == (way.spec.kind == "pd")
    given = measured_ways(ways, Options(setups=("mine=aggregated",)))
    assert [way.name for way in given] == ["mine"]


def test_simulated_ways_hold_up_as_they_should(tmp_path: Path) -> None:
    result = simulated(tmp_path)
    whole, chunks = row(result, "whole prompts"), row(result, "chunks of 512")
    apart, parallel = row(result, "prefill apart"), row(result, "parallel prefill")
    assert {cells[1] for cells in result.tables[0].rows} == {"simulated"}
    assert {one.how for one in (*result.sources, *result.findings)} == {"simulated"}
    # A whole prompt of 8192 tokens takes about 0.2 s, in which nobody gets a token.
    assert whole["gaps P99"] > 150
    assert chunks["gaps P99"] < whole["gaps P99"] / 3
    assert chunks["long prompt's TTFT"] > whole["long prompt's TTFT"]
    assert apart["gaps P99"] < chunks["gaps P99"]
    assert parallel["their TTFT P90"] < row(result, "chunks of 2048")["their TTFT P90"]
    assert row(result, "long apart")["their TTFT P90"] < parallel["their TTFT P90"]
    assert row(result, "static")["calm TTFT P90"] > 10 * whole["calm TTFT P90"]
    assert (whole["devices"], apart["devices"]) == (1, 2)
    assert any("transfers take no time" in note for note in result.notes)
    assert any("prefill apart" in one.text for one in result.findings[:2])


def test_bars_off_the_scale_are_named_and_not_drawn(tmp_path: Path) -> None:
    way = ways_of(LOAD)[0]
    trace = Trace("t", (Request(0.0, 9000, 2), Request(0.0, 9, 2)))

    def of(name: str, ttft_ms: float) -> Row:
        replies = [Reply(index, ttft_ms, ttft_ms, 2, np.array([1.0])) for index in range(2)]
        held = held_up(replies, {0: 0.0, 1: 1e-4}, trace, 100)
        named = replace(way, name=name)
        return Row(named, "measured", 1, held)

    figure = next(figures_of([of("a", 10.0), of("b", 20.0), of("c", 900.0)]))
    panel = figure.panels[0]
    assert isinstance(panel, Bars)
    assert [bar.label for bar in panel.bars] == ["a", "b"]
    assert panel.title.endswith("(off the scale, in the table: c)")


def test_measured_points_are_read_by_the_clock_of_their_client(tmp_path: Path) -> None:
    replay = read_replay(LOAD.write(tmp_path / "trace.jsonl"))
    ways = ways_of(LOAD)
    requests = replay.trace.requests
    folder = tmp_path / "run" / "whole"
    folder.mkdir(parents=True)
    save_setup(folder, PDSetup(name="whole", kind="aggregated", connector="none", model="m"))
    point = replay.point(64)
    save_point(folder, point)

    def write(count: int) -> None:
        ttfts = [0.5 if one.num_prompt_tokens == LOAD.long else 0.02 for one in requests[:count]]
        result = {
            "duration": 12.0,
            "completed": count,
            "failed": 0,
            "ttfts": ttfts,
            "itls": [[0.01] * (LOAD.osl - 1)] * count,
            "input_lens": [one.num_prompt_tokens for one in requests[:count]],
            "output_lens": [LOAD.osl] * count,
            "start_times": [77.0 + one.arrival_s for one in requests[:count]],
            "errors": [""] * count,
        }
        bench_path(folder, point).write_text(json.dumps(result))

    write(len(requests))
    (found,) = recorded(tmp_path / "run", ways, replay, LOAD)
    assert (found.way.name, found.how, found.num_devices) == ("whole prompts", "measured", 1)
    assert list(found.held.long_ttft.values_ms) == pytest.approx([500] * 3)
    assert len(found.held.ttft) == 3 * 8  # 16 a second, half a second each
    write(5)
    assert list(recorded(tmp_path / "run", ways, replay, LOAD)) == []  # of another load


def test_records_of_other_loads_are_refused(tmp_path: Path) -> None:
    context = Context(
        out=tmp_path,
        size="gpu",
        options=find_experiment("batching").sizes["gpu"],
        command=("x",),
        make_launcher=no_launcher,
        records=(tmp_path,),
    )
    with pytest.raises(InvalidUsage, match="leave --records out"):
        find_experiment("batching").run(context)
