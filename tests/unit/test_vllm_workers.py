"""A prefill and a decode worker without vLLM: every way a hand-over can go, and its bytes."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from vllm_fake_engine import LAYERS, FakeEngine, kv_of
from vllm_fakes import blocks, receive_params, request, send_params, step

from kvxfer.connectors.vllm import worker_side

N = 100  # tokens of a prompt; all but the last are sent
SRC, DST = list(range(2, 9)), [5, 3]  # seven blocks of 16, two of 64


@pytest.fixture
def prefill() -> Iterator[FakeEngine]:
    engine = FakeEngine("send")
    yield engine
    engine.close()


@pytest.fixture
def decode() -> Iterator[FakeEngine]:
    engine = FakeEngine("receive", block_size=64, num_blocks=12)  # limits far above the test's
    yield engine
    engine.close()


def place(decode: FakeEngine, *, request_id: str = "d", held_tokens: int = 0) -> Any:
    made = request(request_id, receive_params("t"), num_prompt_tokens=N)
    decode.scheduler.allocated(made, blocks(DST), N - 1 - held_tokens)
    decode.step()
    return made


def admit(prefill: FakeEngine, decode: FakeEngine) -> Any:
    made = request("p", send_params("t", decode.addresses), num_prompt_tokens=N)
    prefill.scheduler.allocated(made, blocks(SRC), 0)
    return made


def prefill_all(prefill: FakeEngine, *, seed: int = 1, **args: Any) -> None:
    prefill.step(step(new={"p": (SRC, 0, N)}), [(seed, SRC, range(N))], **args)


def received(decode: FakeEngine) -> Any:
    decode.until(lambda: bool(decode.received), "the decoder heard nothing")
    assert len(decode.received) == 1
    return decode.received[0]


def begun(prefill: FakeEngine, decode: FakeEngine) -> None:
    """The first chunk of the prompt, on the other side."""
    prefill.step(step(new={"p": (SRC[:3], 0, 40)}), [(1, SRC, range(40))])
    decode.until(lambda: bool(decode.read(1, DST, range(39, 40)).any()), "nothing arrives")


def freed(prefill: FakeEngine, made: Any) -> None:
    """The prefill engine ends its request, and gets its blocks back."""
    assert prefill.scheduler.finished(made)
    prefill.step(ended=["p"])
    prefill.until(lambda: prefill.sent == ["p"], "the blocks were not given back")
    assert not prefill.scheduler.has_pending_push_work


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("layerwise", [True, False])
def test_a_prompt_is_handed_over(
    prefill: FakeEngine, decode: FakeEngine, first: str, layerwise: bool
) -> None:
    if first == "decode":
        place(decode)
    made = admit(prefill, decode)
    prefill_all(prefill, layerwise=layerwise)
    if first == "prefill":
        place(decode)
    ended = received(decode)
    assert (ended.request_id, ended.is_failed) == ("d", False)
    assert decode.holds(1, DST, range(N - 1))
    freed(prefill, made)


def test_the_slot_of_the_last_token_is_not_written(prefill: FakeEngine, decode: FakeEngine) -> None:
    place(decode)
    admit(prefill, decode)
    prefill_all(prefill)
    received(decode)
    assert not decode.read(0, DST, range(N - 1, 128)).any()


def test_chunks_are_handed_over_as_they_come(prefill: FakeEngine, decode: FakeEngine) -> None:
    place(decode)
    made = admit(prefill, decode)
    prefill.step(step(new={"p": (SRC[:3], 0, 40)}), [(1, SRC, range(40))])
    prefill.step(step(cached={"p": (SRC[3:6], 40, 50)}), [(1, SRC, range(40, 90))])
    decode.step()
    assert decode.received == []
    prefill.step(step(cached={"p": (SRC[6:], 90, 10)}), [(1, SRC, range(90, N))])
    assert not received(decode).is_failed
    assert decode.holds(1, DST, range(N - 1))
    freed(prefill, made)


def test_what_each_side_has_in_its_cache_is_left_out(
    prefill: FakeEngine, decode: FakeEngine
) -> None:
    place(decode, held_tokens=64)
    made = admit(prefill, decode)
    for layer in range(LAYERS):
        prefill.write(layer, SRC, range(48), kv_of(1, layer, range(48)))
    prefill.step(step(new={"p": (SRC, 48, N - 48)}), [(1, SRC, range(48, N))])
    assert not received(decode).is_failed
    assert not decode.read(0, DST, range(64)).any()
    assert decode.holds(1, DST, range(64, N - 1))
    freed(prefill, made)


def test_a_decoder_that_has_all_of_it_waits_for_nothing(
    prefill: FakeEngine, decode: FakeEngine
) -> None:
    decode.scheduler.allocated(
        request("d", receive_params("t"), num_prompt_tokens=N), blocks(DST), 0
    )
    decode.step()
    made = admit(prefill, decode)
    prefill_all(prefill)
    freed(prefill, made)
    decode.step()
    assert decode.received == []
    assert prefill.worker.counters.take()["num_sends"] == 1
    assert not decode.read(0, DST, range(N)).any()


def test_a_preempted_prefill_is_handed_over_after_all(
    prefill: FakeEngine, decode: FakeEngine
) -> None:
    place(decode)
    made = admit(prefill, decode)
    begun(prefill, decode)
    # Its blocks go to another request, which writes to them at once.
    prefill.step(step(preempted=["p"]), [(7, SRC, range(48))])
    again = list(range(12, 19))
    prefill.step(step(cached={"p": (again, 0, N)}, resumed=["p"]), [(1, again, range(N))])
    ended = received(decode)
    assert not ended.is_failed
    assert decode.holds(1, DST, range(N - 1))
    freed(prefill, made)


def test_a_prefill_that_ends_while_it_is_preempted_fails_the_decoder(
    prefill: FakeEngine, decode: FakeEngine
) -> None:
    place(decode)
    made = admit(prefill, decode)
    begun(prefill, decode)
    prefill.step(step(preempted=["p"]))
    freed(prefill, made)
    ended = received(decode)
    assert (ended.is_failed, ended.failed_block_ids) == (True, frozenset(DST))


def test_an_aborted_prefill_fails_the_decoder(prefill: FakeEngine, decode: FakeEngine) -> None:
    place(decode)
    made = admit(prefill, decode)
    begun(prefill, decode)
    made.status.name = "FINISHED_ABORTED"
    freed(prefill, made)
    assert received(decode).is_failed


def test_a_decoder_that_gives_up_frees_both_sides(prefill: FakeEngine, decode: FakeEngine) -> None:
    waiting = place(decode)
    made = admit(prefill, decode)
    begun(prefill, decode)
    decode.scheduler.finished(waiting)
    ended = received(decode)
    assert (ended.request_id, ended.failed_block_ids) == ("d", frozenset())
    prefill.step(step(cached={"p": (SRC[3:], 40, 60)}), [(1, SRC, range(40, N))])
    freed(prefill, made)
    assert prefill.worker.counters.take()["num_failed_sends"] == 1


def test_a_decode_request_that_never_had_blocks_frees_the_prefill(
    prefill: FakeEngine, decode: FakeEngine
) -> None:
    decode.scheduler.finished(request("d", receive_params("t"), num_prompt_tokens=N))
    decode.step()
    made = admit(prefill, decode)
    prefill_all(prefill)
    freed(prefill, made)
    assert prefill.worker.counters.take()["num_failed_sends"] == 1


def test_a_decoder_without_a_prefill_fails_in_time() -> None:
    decode = FakeEngine("receive", block_size=64, num_blocks=12, receive_timeout_s=0.05)
    try:
        place(decode)
        ended = received(decode)
        assert (ended.is_failed, ended.failed_block_ids) == (True, frozenset(DST))
    finally:
        decode.close()


def test_a_decoder_that_was_silent_for_too_long_does_not_wait_for_who_gave_it_up(
    decode: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = partial(worker_side.SendLimits, silent_s=3.0, connect_s=5.0, num_attempts=1)
    monkeypatch.setattr(worker_side, "SendLimits", limits)
    prefill = FakeEngine("send")
    try:
        side = decode.worker._receive
        assert side is not None
        with side._lock:  # the thread that serves senders stands still
            made = admit(prefill, decode)
            prefill_all(prefill)
            freed(prefill, made)
        assert prefill.worker.counters.take()["num_failed_sends"] == 1
        prefill.close()  # once the decoder has heard that it left
        place(decode)
        assert received(decode).is_failed  # and not after the 120 s that others are awaited
    finally:
        prefill.close()


def test_two_prompts_that_differ_in_length_are_refused(
    prefill: FakeEngine, decode: FakeEngine
) -> None:
    place(decode)
    made = request("p", send_params("t", decode.addresses), num_prompt_tokens=N - 1)
    prefill.scheduler.allocated(made, blocks(SRC), 0)
    prefill.step(step(new={"p": (SRC, 0, N - 1)}), [(1, SRC, range(N - 1))])
    assert received(decode).is_failed
    freed(prefill, made)


def test_a_prefill_whose_decoder_is_gone_keeps_its_blocks_no_longer_than_it_tries() -> None:
    prefill = FakeEngine("send", send_timeout_s=0.2)
    try:
        nobody = {"init": "tcp://127.0.0.1:9", "alloc": "tcp://127.0.0.1:9"}
        made = request("p", send_params("t", nobody), num_prompt_tokens=N)
        prefill.scheduler.allocated(made, blocks(SRC), 0)
        prefill_all(prefill)
        made.status.name = "FINISHED_ABORTED"
        freed(prefill, made)
    finally:
        prefill.close()


def test_a_receiver_that_is_no_address_fails_its_request_alone(
    prefill: FakeEngine, decode: FakeEngine
) -> None:
    bad = request("bad", send_params("u", {"init": "no url", "alloc": "nor this"}))
    prefill.scheduler.allocated(bad, blocks(SRC), 0)
    place(decode)
    made = admit(prefill, decode)
    prefill.step(
        step(new={"bad": (list(range(10, 17)), 0, 100), "p": (SRC, 0, N)}), [(1, SRC, range(N))]
    )
    assert not received(decode).is_failed
    freed(prefill, made)


def test_heads_of_two_ranks_meet_in_one(decode: FakeEngine) -> None:
    ranks = [FakeEngine("send", tp=(2, rank)) for rank in (0, 1)]
    try:
        place(decode)
        for rank in ranks:
            admit(rank, decode)
            prefill_all(rank)
        assert not received(decode).is_failed
        assert decode.holds(1, DST, range(N - 1))
    finally:
        for rank in ranks:
            rank.close()


def test_requests_that_follow_each_other_share_the_pair(
    prefill: FakeEngine, decode: FakeEngine
) -> None:
    for number in range(4):
        name, dst = f"t{number}", [1 + 2 * number, 2 + 2 * number]
        waiting = request(f"d{number}", receive_params(name), num_prompt_tokens=N)
        decode.scheduler.allocated(waiting, blocks(dst), N - 1)
        sent = request(f"p{number}", send_params(name, decode.addresses), num_prompt_tokens=N)
        prefill.scheduler.allocated(sent, blocks(SRC), 0)
        src = list(range(1 + number, 8 + number))
        prefill.step(step(new={sent.request_id: (src, 0, N)}), [(number, src, range(N))])
        assert not received(decode).is_failed
        decode.received.clear()
        assert decode.holds(number, dst, range(N - 1))
