"""Hand-overs that do not end well: both engines live on, with all blocks back and right tokens."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import vllm_stand_in
from vllm_engines import Pair, texts
from vllm_fakes import receive_params, send_params
from waiting import GUARD_S, eventually

from kvxfer.connectors.vllm.params import attempt_id


def body(seed: int, length: int = 700, **more: Any) -> dict[str, Any]:
    tokens = [(seed * 977 + at * 31) % 7919 + 1 for at in range(length)]
    return {"prompt": tokens, "max_tokens": 8, "temperature": 0, **more}


def drained(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        eventually(engine.is_drained, "blocks are still in use")


@contextmanager
def stand_in(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A process in the place of an engine; it is killed at the end at the latest."""
    program = Path(vllm_stand_in.__file__)
    process = subprocess.Popen(
        [sys.executable, str(program), *words],
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(GUARD_S)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def said(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def test_a_decode_leg_without_a_prefill_is_recomputed(pair: Pair) -> None:
    asked = body(1)
    params = receive_params(pair.new_id())
    assert texts(pair.decode.ask({**asked, "kv_transfer_params": params})) == texts(
        pair.alone(asked)
    )
    drained(pair)


def test_a_prefill_leg_without_a_decode_leg_is_freed_when_its_client_leaves(pair: Pair) -> None:
    failed = pair.prefill.metric("kvxfer:num_failed_sends_total")
    leg = pair.prefill.send_only(pair.prefill_body(body(2, 3000), pair.new_id()))
    time.sleep(0.2)
    leg.close()
    drained(pair)
    assert pair.prefill.metric("kvxfer:num_failed_sends_total") >= failed


def test_a_decode_leg_whose_client_leaves_frees_both(pair: Pair) -> None:
    transfer_id = pair.new_id()
    leg = pair.decode.send_only({**body(3), "kv_transfer_params": receive_params(transfer_id)})
    eventually(lambda: not pair.decode.is_drained(), "the decode leg was not taken up")
    leg.close()
    eventually(pair.decode.is_drained, "the decoder keeps the blocks of a client that left")
    began_s = time.monotonic()
    pair.prefill.ask(pair.prefill_body(body(3), transfer_id))
    eventually(pair.prefill.is_drained, "the prefill engine waits for a decoder that is gone")
    assert time.monotonic() - began_s < GUARD_S


@pytest.mark.every_transport
def test_a_prefill_engine_that_dies_half_way_is_made_up_for(pair: Pair) -> None:
    asked, transfer_id = body(4), pair.new_id()
    name = attempt_id(transfer_id, 1, pair.decode.page_format())
    with (
        ThreadPoolExecutor(1) as thread,
        stand_in(pair.transport, "send", json.dumps(pair.addresses), name, "6") as sender,
    ):
        params = receive_params(transfer_id)
        reply = thread.submit(pair.decode.ask, {**asked, "kv_transfer_params": params})
        assert said(sender) == "pushed"
        time.sleep(0.3)  # the first layer is under way, or there
        sender.kill()
        assert texts(reply.result(GUARD_S)) == texts(pair.alone(asked))
    drained(pair)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_decoder_that_dies_or_hangs_frees_the_prefill(pair: Pair, number: int) -> None:
    with stand_in(pair.transport, "receive") as receiver:
        addresses = said(receiver)
        params = send_params(pair.new_id(), addresses)
        pair.prefill.ask({**body(5), "max_tokens": 1, "kv_transfer_params": params})
        assert said(receiver)[0] == "asked"
        assert not pair.prefill.is_drained()
        os.kill(receiver.pid, number)
        eventually(pair.prefill.is_drained, "the prefill engine waits for a decoder that is gone")


def test_an_address_that_nobody_listens_at_costs_one_request(pair: Pair) -> None:
    nobody = {"init": "tcp://127.0.0.1:9", "alloc": "tcp://127.0.0.1:9"}
    params = send_params(pair.new_id(), nobody)
    leg = pair.prefill.ask({**body(6), "max_tokens": 1, "kv_transfer_params": params})
    assert leg["usage"]["completion_tokens"] == 1
    asked = body(7)
    assert texts(pair.hand_over(asked)) == texts(pair.alone(asked))
    drained(pair)


def test_legs_with_two_prompts_are_made_up_for(pair: Pair) -> None:
    transfer_id, asked = pair.new_id(), body(8)
    params = receive_params(transfer_id)
    with ThreadPoolExecutor(1) as thread:
        leg = thread.submit(pair.prefill.ask, pair.prefill_body(body(8, 300), transfer_id))
        reply = pair.decode.ask({**asked, "kv_transfer_params": params})
        leg.result(GUARD_S)
    assert texts(reply) == texts(pair.alone(asked))
    drained(pair)


def test_clients_that_come_and_go_leave_nothing_behind(pair: Pair) -> None:
    def one(number: int) -> None:
        asked, transfer_id = body(100 + number, 200 + 37 * number), pair.new_id()
        params = receive_params(transfer_id)
        legs = [
            pair.prefill.send_only(pair.prefill_body(asked, transfer_id)),
            pair.decode.send_only({**asked, "kv_transfer_params": params}),
        ]
        time.sleep(0.03 * (number % 7))
        for leg in legs if number % 2 else reversed(legs):
            leg.close()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(one, range(24)))
    drained(pair)
    asked = body(99)
    assert texts(pair.hand_over(asked)) == texts(pair.alone(asked))
