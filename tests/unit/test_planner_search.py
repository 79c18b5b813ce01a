"""Which set-ups a plan compares."""

import pytest

from kvxfer.errors import InvalidUsage
from kvxfer.pd.planner.search import STRATEGIES, Space, candidates, parse_strategy


def names(**fields: object) -> list[str]:
    return [one.name for one in candidates(Space(**fields))]  # type: ignore[arg-type]


def test_every_way_to_spend_four_gpus_is_there() -> None:
    assert names(num_gpus=[4], tp_sizes=[1, 2]) == [
        "agg-2xtp2",
        "agg-4xtp1",
        "pd-1xtp1+3xtp1",
        "pd-1xtp2+1xtp2",
        "pd-1xtp2+2xtp1",
        "pd-2xtp1+1xtp2",
        "pd-2xtp1+2xtp1",
        "pd-3xtp1+1xtp1",
    ]


def test_every_set_up_spends_a_total_whole() -> None:
    found = candidates(Space(num_gpus=[2, 6, 8], tp_sizes=[1, 2, 4]))
    assert {one.setup.num_gpus for one in found} == {2, 6, 8}
    assert len({one.name for one in found}) == len(found)


def test_a_budget_concerns_aggregated_set_ups_alone() -> None:
    found = candidates(Space(num_gpus=[4], tp_sizes=[2], token_budgets=[2048, 8192]))
    assert [one.name for one in found] == ["agg-2xtp2-b2048", "agg-2xtp2-b8192", "pd-1xtp2+1xtp2"]
    assert found[-1].setup.token_budget == 8192


def test_a_strategy_is_played_where_it_can_be() -> None:
    strategies = [parse_strategy("chunked"), parse_strategy("long-engine")]
    found = names(num_gpus=[2], tp_sizes=[1, 2], strategies=strategies, kinds=["aggregated"])
    assert found == ["agg-1xtp2/chunked", "agg-2xtp1/chunked", "agg-2xtp1/long-engine"]


def test_engines_for_long_prompts_may_be_larger() -> None:
    space = Space(
        num_gpus=[8],
        tp_sizes=[2],
        kinds=["aggregated"],
        strategies=[parse_strategy("long-engine")],
        long_tp=4,
    )
    (found,) = candidates(space)
    assert found.setup.prefill_tps == (2, 2, 4)
    assert found.setup.num_gpus == 8


def test_fields_of_a_strategy_can_be_changed() -> None:
    name, strategy = parse_strategy("parallel-prefill:num_long_prefills=2:prefix_cache=true")
    assert name == "parallel-prefill:num_long_prefills=2:prefix_cache=true"
    assert strategy.num_parallel_prefills == STRATEGIES["parallel-prefill"].num_parallel_prefills
    assert (strategy.num_long_prefills, strategy.prefix_cache) == (2, True)


def test_a_store_has_a_bandwidth_and_reuse() -> None:
    _, strategy = parse_strategy("store:gb_per_s=25")
    assert strategy.store is not None
    assert (strategy.store.gb_per_s, strategy.prefix_cache) == (25.0, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lottery", "is not known; use chunked"),
        ("chunked:colour=red", "colour"),
        ("chunked:prefix_cache", "no FIELD=VALUE"),
        ("chunked:batch_size=none", "batch_size"),
        ("store", "gb_per_s"),
    ],
)
def test_a_strategy_that_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        parse_strategy(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_gpus": [3], "tp_sizes": [2]}, "no set-up spends 3 GPUs"),
        ({"num_gpus": [], "tp_sizes": [2]}, "num_gpus is"),
        ({"num_gpus": [4], "tp_sizes": [0]}, "tp_sizes is"),
        ({"num_gpus": list(range(1, 200)), "tp_sizes": [1, 2, 4]}, "more than 2000"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused(
    fields: dict[str, list[int]], message: str
) -> None:
    with pytest.raises(InvalidUsage, match=message):
        names(**fields)
