"""A model with full and sliding layers, no prefix caches, and requests that fail with their KV."""

import json
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import Pair, texts
from vllm_fakes import receive_params
from waiting import eventually

WINDOW = 200
TOKEN_LAYER_BYTES = 2 * 2 * 64 * 4


@pytest.fixture(scope="module")
def hybrid(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("hybrid")
    for file in tiny.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((tiny / "config.json").read_text())
    config |= {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "sliding_window": WINDOW,
    }
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    pair = Pair(
        folder,
        folder,
        on_failure="fail",
        receive_timeout_s=15.0,
        prefill=["--no-enable-prefix-caching", "--max-num-batched-tokens", "300"],
        decode=["--no-enable-prefix-caching"],
    )
    with pair.running():
        yield pair


def body(seed: int, length: int) -> dict[str, Any]:
    tokens = [(seed * 977 + at * 31) % 7919 + 1 for at in range(length)]
    return {"prompt": tokens, "max_tokens": 12, "temperature": 0}


@pytest.mark.parametrize("length", [1, 2, 128, 129, WINDOW, WINDOW + 2, 385, 512, 513, 1500])
def test_a_prompt_gives_the_same_tokens(hybrid: Pair, length: int) -> None:
    asked = body(length, length)
    assert texts(hybrid.hand_over(asked)) == texts(hybrid.alone(asked))


def test_a_sliding_layer_hands_over_its_window_alone(hybrid: Pair) -> None:
    before = hybrid.prefill.metric("kvxfer:sent_bytes_total")
    length = 8 * 128
    hybrid.hand_over(body(50, length + 1))
    full, slides = 2 * length, 2 * 3 * 128  # a window of 200 touches at most three blocks
    eventually(
        lambda: hybrid.prefill.metric("kvxfer:sent_bytes_total") > before, "nothing was counted"
    )
    sent = hybrid.prefill.metric("kvxfer:sent_bytes_total") - before
    assert full * TOKEN_LAYER_BYTES < sent <= (full + slides) * TOKEN_LAYER_BYTES


def test_a_request_without_its_kv_fails_by_itself(hybrid: Pair) -> None:
    params = receive_params(hybrid.new_id())
    with hybrid.decode.replying({**body(60, 400), "kv_transfer_params": params}) as reply:
        assert is_error(reply)
    eventually(hybrid.decode.is_drained, "blocks of a failed request are in use")
    asked = body(61, 400)
    assert texts(hybrid.hand_over(asked)) == texts(hybrid.alone(asked))


def is_error(reply: HTTPResponse) -> bool:
    text = json.loads(reply.read())
    return reply.status >= 500 or text["choices"][0]["finish_reason"] == "error"
