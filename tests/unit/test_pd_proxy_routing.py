"""Which engine a request goes to, without any."""

import json
from typing import Any

import pytest

from kvxfer.pd.proxy.body import Body, read_body
from kvxfer.pd.proxy.engine import Engine
from kvxfer.pd.proxy.failure import Failure
from kvxfer.pd.proxy.options import EngineAddress
from kvxfer.pd.proxy.routing import PrefixAffinity, Router, output_tokens, prompt_of


def engines(count: int) -> list[Engine]:
    made = [Engine(EngineAddress("prefill", "h", 1 + index)) for index in range(count)]
    for engine in made:
        engine.down_reason = ""
    return made


def body(prompt: Any = (1, 2), **fields: Any) -> Body:
    return read_body(json.dumps({"prompt": prompt, **fields}).encode(), is_chat=False)


def chosen(router: Router, asked: Body) -> Engine:
    return router.choose(asked, ("prefill",))["prefill"]


def test_equal_engines_take_turns() -> None:
    those = engines(3)
    router = Router(those, "least-tokens")
    assert {chosen(router, body()) for _ in range(3)} == set(those)


def test_the_fewest_tokens_win_and_then_the_fewest_requests() -> None:
    those = engines(3)
    router = Router(those, "least-tokens")
    those[0].carry(10)
    those[1].carry(7)
    those[2].carry(7)
    those[2].carry(0)
    assert all(chosen(router, body()) is those[1] for _ in range(4))


def test_a_load_is_taken_off_once() -> None:
    (engine,) = engines(1)
    with engine.carry(10) as load:
        load.release()
        assert engine.outstanding_tokens == engine.outstanding_requests == 0
    assert engine.outstanding_tokens == engine.outstanding_requests == 0
    with pytest.raises(KeyError), engine.carry(10):
        raise KeyError
    assert engine.outstanding_tokens == engine.outstanding_requests == 0


def test_engines_that_are_down_get_nothing_and_are_named_when_all_are() -> None:
    those = engines(2)
    router = Router(those, "least-tokens")
    those[0].suspect("it burns")
    assert all(chosen(router, body()) is those[1] for _ in range(4))
    those[1].suspect("it sleeps")
    with pytest.raises(Failure, match=r"h:1: it burns; h:2: it sleeps") as error:
        chosen(router, body())
    assert error.value.status == 503


def test_a_seen_prefix_is_worth_its_tokens_and_no_more() -> None:
    those = engines(2)
    router = Router(those, "prefix-affinity")
    long = body([7] * 4000)
    home = chosen(router, long)
    other = those[1 - those.index(home)]
    home.carry(1000)
    assert chosen(router, long) is home  # 4,000 tokens fewer to compute, 1,000 more waiting
    home.carry(10_000)
    assert chosen(router, long) is other


def test_prefixes_that_differ_early_are_strangers() -> None:
    affinity, (engine,) = PrefixAffinity(), engines(1)
    first, second = (prompt_of(body([seed, *[5] * 1000])) for seed in (1, 2))
    affinity.remember(engine, affinity.keys(first))
    assert affinity.seen_tokens(engine, affinity.keys(first)) > 400
    assert affinity.seen_tokens(engine, affinity.keys(second)) == 0


def test_a_common_prefix_counts_as_far_as_it_goes() -> None:
    affinity, (engine,) = PrefixAffinity(), engines(1)
    half, whole = (prompt_of(body("x" * count)) for count in (2048, 8192))
    affinity.remember(engine, affinity.keys(half))
    assert affinity.seen_tokens(engine, affinity.keys(whole)) == 2048 // 4


def test_old_prefixes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixAffinity, "MAX_PREFIXES", 8)
    affinity, (engine,) = PrefixAffinity(), engines(1)
    old, new = (affinity.keys(prompt_of(body(letter * 1024))) for letter in "ab")
    affinity.remember(engine, old)
    affinity.remember(engine, affinity.keys(prompt_of(body("c" * 1024))))
    affinity.remember(engine, old)  # used again, so c is the oldest now
    affinity.remember(engine, new)
    assert affinity.seen_tokens(engine, old) == affinity.seen_tokens(engine, new) == 1024 // 4


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"max_tokens": 100}, 100),
        ({"max_tokens": 100, "n": 3}, 300),
        ({}, 256),
        ({"max_tokens": 1 << 60}, 1 << 20),
        ({"max_tokens": -5}, 0),
        ({"max_tokens": "x"}, 256),
    ],
)
def test_the_load_of_an_output_is_what_it_may_become(fields: dict[str, Any], tokens: int) -> None:
    assert output_tokens(body(**fields)) == tokens


def test_the_load_of_a_prompt_is_exact_for_token_ids() -> None:
    assert prompt_of(body(list(range(777)))).num_tokens == 777
    assert prompt_of(body("four" * 100)).num_tokens == 100
    chat = read_body(b'{"messages": [' + b" " * 398 + b"]}", is_chat=True)
    assert prompt_of(chat).num_tokens == 100
    assert prompt_of(body([[1], [2]])).num_tokens > 0
