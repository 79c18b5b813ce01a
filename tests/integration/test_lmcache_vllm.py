"""`KvxferLMCacheConnector` in vLLM engines on a CPU: what is handed over gives the same tokens."""

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("lmcache") is None or importlib.util.find_spec("vllm") is None:
    pytest.skip("LMCache and vLLM are not both installed", allow_module_level=True)

from lmcache_engines import LMCachePair
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


def test_prompts_through_the_proxy_give_the_tokens_of_one_server(pair: LMCachePair) -> None:
    before = pair.decode.metric("vllm:external_prefix_cache_hits_total")
    with Front(pair, "--connector", "lmcache", "--proxy-port", str(pair.notices)) as front:
        for length in LENGTHS:
            rng = random.Random(length)
            prompt = [rng.randrange(1, 8000) for _ in range(length)]
            body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
            assert texts(front.ask(body)) == texts(pair.prefill.ask(body))
    # All of a prompt: the decode engine computes the token alone that the other one answered with.
    hits = pair.decode.metric("vllm:external_prefix_cache_hits_total") - before
    assert hits == sum(LENGTHS)
