"""`KvxferLMCacheConnector` in vLLM engines on a CPU: what is handed over gives the same tokens."""

import importlib.util
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

if importlib.util.find_spec("lmcache") is None or importlib.util.find_spec("vllm") is None:
    pytest.skip("LMCache and vLLM are not both installed", allow_module_level=True)

from lmcache_engines import WAIT_S, LMCachePair
from vllm_engines import START_S, Front, texts

from kvxfer.pd.models import find_model

_HELPERS = Path(__file__).parents[1] / "helpers"
LENGTHS = (256, 512, 1024)  # whole chunks; see `lmcache_on_cpu`
pytestmark = pytest.mark.timeout(2 * START_S)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCachePair]:
    folder = tmp_path_factory.mktemp("pair")
    model = Path(find_model("tiny", folder).source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(_HELPERS))  # of `lmcache_on_cpu`
        patch.setenv("PYTHONHASHSEED", "0")  # keys of chunks are hashes, equal on both sides
        patch.setenv("LMCACHE_TRACK_USAGE", "false")
        made = LMCachePair(model, folder)
    try:
        made.wait_until_up()
        yield made
    finally:
        made.stop()


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 8000) for _ in range(length)]


def hits_of(pair: LMCachePair) -> float:
    return pair.decode.metric("vllm:external_prefix_cache_hits_total")


def test_prompts_through_the_proxy_give_the_tokens_of_one_server(pair: LMCachePair) -> None:
    before = hits_of(pair)
    with Front(pair, "--connector", "lmcache", "--proxy-port", str(pair.notices)) as front:
        for length in LENGTHS:
            body = {"prompt": prompt_of(length, length), "max_tokens": 12, "temperature": 0}
            assert texts(front.ask(body)) == texts(pair.prefill.ask(body))
    # All of a prompt: the decode engine computes the token alone that the other one answered with.
    assert hits_of(pair) - before == sum(LENGTHS)


# What two legs in turn cannot answer as one server, because both tell a part of the output.
@pytest.mark.parametrize("more", [{}, {"presence_penalty": 1.5}, {"temperature": 0.9, "seed": 7}])
def test_legs_that_are_sent_at_once_give_the_tokens_of_one_server(
    pair: LMCachePair, more: dict[str, float]
) -> None:
    before = hits_of(pair)
    options = ("--connector", "lmcache-together", "--proxy-port", str(pair.notices))
    with Front(pair, *options) as front:
        for length in LENGTHS:
            prompt = prompt_of(length, length + len(str(more)))
            body = {"prompt": prompt, "max_tokens": 12, "temperature": 0} | more
            assert texts(front.ask(body)) == texts(pair.prefill.ask(body))
    # The last token of a prompt is computed where it is decoded.
    assert hits_of(pair) - before == sum(LENGTHS) - len(LENGTHS)


def test_many_at_once_wait_for_their_own_kv(pair: LMCachePair) -> None:
    prompts = [prompt_of(256 + 256 * (number % 2), 1000 + number) for number in range(8)]
    bodies = [{"prompt": prompt, "max_tokens": 6, "temperature": 0} for prompt in prompts]
    before = hits_of(pair)
    options = ("--connector", "lmcache-together", "--proxy-port", str(pair.notices))
    with Front(pair, *options) as front, ThreadPoolExecutor(len(bodies)) as clients:
        answers = [texts(answer) for answer in clients.map(front.ask, bodies)]
    assert hits_of(pair) - before == sum(map(len, prompts)) - len(prompts)
    assert answers == [texts(pair.prefill.ask(body)) for body in bodies]


def test_kv_that_never_comes_is_computed(pair: LMCachePair) -> None:
    body = {"prompt": prompt_of(256, 99), "max_tokens": 6, "temperature": 0}
    receive = {"kvxfer": {"role": "receive", "transfer_id": "nobody"}}
    alone = pair.decode.ask(body | {"kv_transfer_params": receive})
    assert f"(transfer 'nobody') has not arrived within {WAIT_S:g} s" in pair.decode.tail()
    assert texts(alone) == texts(pair.prefill.ask(body))


def test_kv_that_does_not_fit_the_receiver_is_computed_at_once(pair: LMCachePair) -> None:
    length = pair.num_pool_tokens + 256
    body = {"prompt": prompt_of(length, 5), "max_tokens": 6, "temperature": 0}
    options = ("--connector", "lmcache-together", "--proxy-port", str(pair.notices))
    with Front(pair, *options) as front:
        assert texts(front.ask(body)) == texts(pair.prefill.ask(body))
    assert "was lost on its way" in pair.decode.tail()
