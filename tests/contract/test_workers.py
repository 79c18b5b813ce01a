"""Both workers in this process: what arrives is checked, and what is wrong is seen by both."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from kvxfer import KVLayout, ToFp8, TPLayout
from kvxfer.errors import InvalidUsage, NotAvailable, VerificationError
from kvxfer.layout import KVKind, Order
from kvxfer.worker import DecodeWorker, PrefillWorker, Received, SendResult, WorkerOptions
from kvxfer.worker.content import content_of, tokens_in_blocks

LAYOUT = KVLayout(3, 4, head_dim=8, block_size=4)
OTHER = replace(LAYOUT, order=Order.HND, block_size=16, kv=KVKind.HEAD_PACKED)
NUM_BLOCKS = 32


def options_of(layout: KVLayout = LAYOUT, rank: TPLayout | None = None) -> WorkerOptions:
    rank = rank or TPLayout()
    return WorkerOptions(layout=layout, rank=rank, transport="loopback", num_threads=2)


class Running:
    """A decode worker that is served by a thread."""

    def __init__(self, layout: KVLayout, rank: TPLayout | None) -> None:
        self.worker = DecodeWorker(options_of(layout, rank), NUM_BLOCKS)
        self.received: list[Received] = []
        self._ended = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended:
            received = self.worker.next(0.01)
            if received is not None:
                self.received.append(received)

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        self.worker.close()


@contextmanager
def decode(*ranks: TPLayout, layout: KVLayout = LAYOUT) -> Iterator[list[Running]]:
    running: list[Running] = []
    try:
        for rank in ranks or (TPLayout(),):
            running.append(Running(layout, rank))
        yield running
    finally:
        for one in running:
            one.close()


def send(
    running: list[Running],
    *,
    layout: KVLayout = LAYOUT,
    convert: ToFp8 | None = None,
    named: bool = True,
) -> SendResult:
    to = [dict(one.worker.addresses) for one in running]
    for one in to if not named else ():
        del one["worker"]
    with PrefillWorker(options_of(layout), num_tokens=19, concurrency=2, convert=convert) as worker:
        return worker.run(to, name="run", num_requests=3)


def test_every_byte_of_a_request_is_checked() -> None:
    with decode() as running:
        result = send(running)
    request_bytes = 19 * LAYOUT.num_layers * LAYOUT.bytes_per_token_per_layer
    assert result.checked
    assert (result.num_requests, result.num_tokens) == (3, 19)
    assert result.request_bytes == request_bytes
    assert result.num_checked_bytes == 3 * request_bytes
    assert result.actual_path
    assert result.latency_p50_ms <= result.latency_p99_ms
    (one,) = running
    assert [item.num_checked_bytes for item in one.received] == [request_bytes] * 4
    assert [item.wrong for item in one.received] == [""] * 4
    assert one.worker.num_wrong == 0


def test_more_requests_than_blocks_take_turns() -> None:
    with decode() as running, PrefillWorker(options_of(), num_tokens=4 * NUM_BLOCKS) as worker:
        to = [running[0].worker.addresses]
        assert worker.run(to, name="run", num_requests=3).checked


@pytest.mark.parametrize("layout", [LAYOUT, OTHER])
def test_ranks_check_their_parts(layout: KVLayout) -> None:
    ranks = [TPLayout(2, tp, pp_size=2, pp_rank=pp) for pp in range(2) for tp in range(2)]
    with decode(*ranks, layout=layout) as running:
        result = send(running)
    assert result.checked
    assert result.num_checked_bytes == 3 * result.request_bytes


def test_what_becomes_fp8_is_checked() -> None:
    with decode(layout=replace(OTHER, dtype="fp8_e4m3")) as running:
        result = send(running, convert=ToFp8())
    assert result.checked
    assert [item.wrong for item in running[0].received] == [""] * 4


def test_wrong_bytes_are_seen_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: PrefillWorker, request_id: str, table: np.ndarray) -> None:  # type: ignore[type-arg]
        content = content_of(request_id)
        assert content is not None
        runs = tokens_in_blocks(table, LAYOUT.block_size, range(19))
        self._pool.fill_tokens(content.seed, runs)
        # One token has what belongs to the next.
        self._pool.fill_tokens(content.seed, replace_keys(runs))

    def replace_keys(runs):  # type: ignore[no-untyped-def]
        return replace(
            runs,
            block_ids=runs.block_ids[-1:],
            slots=runs.slots[-1:],
            counts=runs.counts[-1:] * 0 + 1,
            keys=runs.keys[-1:] + 1,
        )

    monkeypatch.setattr(PrefillWorker, "_fill", fill)
    token_bytes = LAYOUT.num_layers * LAYOUT.bytes_per_token_per_layer
    with decode() as running:
        with pytest.raises(VerificationError, match=f"{token_bytes} of {19 * token_bytes} bytes"):
            send(running)
        assert running[0].worker.num_wrong == 1
        assert "the first in layer 0 K" in running[0].received[0].wrong


def test_without_a_word_of_the_receiver_nothing_counts_as_checked() -> None:
    with decode() as running:
        result = send(running, named=False)
    assert not result.checked
    assert result.num_checked_bytes == 0


def test_an_unknown_name_is_received_and_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with decode() as running:
        monkeypatch.setattr("kvxfer.worker.decode.content_of", lambda _: None)
        result = send(running)
    assert not result.checked
    assert running[0].received[0].num_checked_bytes == 0
    assert running[0].received[0].wrong == ""


def test_a_used_name_is_refused() -> None:
    with decode() as running:
        send(running)
        with pytest.raises(NotAvailable, match=r"kvxfer\.run\.0"):
            send(running)


def test_a_worker_beyond_loopback_wants_a_key() -> None:
    with pytest.raises(InvalidUsage, match="there is no key"):
        DecodeWorker(replace(options_of(), bind_host="192.0.2.7"), NUM_BLOCKS)
    with pytest.raises(InvalidUsage, match="there is no key"):
        PrefillWorker(replace(options_of(), bind_host="192.0.2.7"), num_tokens=4)
