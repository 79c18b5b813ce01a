"""Ten thousand mutated messages on every port: answered soundly or dropped, others are served."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from fuzz import endpoint_samples, fuzz_channel, fuzz_endpoint, is_answered, mutated
from small_servers import layout, serving

from kvxfer.control import CommitRequest, ControlClient, ControlServer, Done, encode
from kvxfer.control._served import ServedChannel
from kvxfer.control.framing import encode_limit

NUM_MESSAGES = 10_000
GUARD_S = 20.0


def test_every_port_of_an_endpoint() -> None:
    with serving(layout()) as endpoint:
        reports = fuzz_endpoint(endpoint, num_messages=NUM_MESSAGES, seed=1)
        assert set(reports) == set(endpoint.addresses)
        for channel, report in reports.items():
            assert report.num_sent == NUM_MESSAGES
            # What is not dropped is refused or granted, and all three happen.
            assert report.num_silent > NUM_MESSAGES // 20
            assert report.answers["ProtocolMismatch"] > NUM_MESSAGES // 4
            assert len(report.answers) >= 3, str(report)
            assert report.grown_bytes < 32 << 20
            samples, replies = endpoint_samples(endpoint)[channel]
            address = endpoint.addresses[channel]
            with ControlClient(address, replies, deadline_s=GUARD_S) as client:
                assert isinstance(client.call(samples[0]), replies)


def test_mutants_are_mostly_wrong_and_differ() -> None:
    random_ = random.Random(0)
    samples = [CommitRequest("r-1", "p-1")]
    mutants = [tuple(mutated(samples, 7, random_)) for _ in range(500)]
    assert len({mutant[1:] for mutant in mutants}) > 300
    right = (*encode(samples[0]),)
    assert sum(mutant[1:3] == right for mutant in mutants) < 100
    assert 0.5 < sum(map(is_answered, mutants)) / len(mutants) < 0.95


def commit(message: CommitRequest) -> Done:
    return Done(message.request_id)


class Faults:
    """What a server may do wrong, each of which the fuzz must find."""

    @staticmethod
    def answer_twice(channel: ServedChannel, parts: list[bytes], serve: Callable[[], None]) -> None:
        serve()
        serve()

    @staticmethod
    def answer_another(
        channel: ServedChannel, parts: list[bytes], serve: Callable[[], None]
    ) -> None:
        parts[1] = b"another"
        serve()

    @staticmethod
    def answer_rubbish(
        channel: ServedChannel, parts: list[bytes], serve: Callable[[], None]
    ) -> None:
        channel._send(parts[0], parts[1], [parts[2], b"\xc1"])

    @staticmethod
    def answer_nothing(
        channel: ServedChannel, parts: list[bytes], serve: Callable[[], None]
    ) -> None:
        pass


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Faults.answer_twice, "which does not wait for one"),
        (Faults.answer_another, "which does not wait for one"),
        (Faults.answer_rubbish, "is none of"),
        (Faults.answer_nothing, "are not answered"),
    ],
)
def test_the_fuzz_finds_a_planted_fault(
    monkeypatch: pytest.MonkeyPatch, fault: Any, text: str
) -> None:
    if fault is Faults.answer_nothing:
        monkeypatch.setattr("fuzz._STUCK_S", 0.5)
    original = ServedChannel._serve

    def serve(self: ServedChannel, frame: Any, parts: list[bytes]) -> None:
        fault(self, parts, lambda: original(self, frame, parts))

    monkeypatch.setattr(ServedChannel, "_serve", serve)
    with (
        ControlServer({"alloc": {CommitRequest: commit}}) as server,
        pytest.raises(Exception, match=text),
    ):
        fuzz_channel(server, "alloc", [CommitRequest("r")], (Done,), num_messages=500, seed=0)


def test_the_fuzz_finds_an_internal_error() -> None:
    def fail(message: CommitRequest) -> Done:
        raise ZeroDivisionError

    with (
        ControlServer({"alloc": {CommitRequest: fail}}) as server,
        pytest.raises(AssertionError, match="internal error"),
    ):
        fuzz_channel(server, "alloc", [CommitRequest("r")], (Done,), num_messages=500, seed=0)


def test_the_limit_frame_of_a_sample_is_right() -> None:
    assert encode_limit(1.5) == (1500).to_bytes(4, "big")
    assert encode_limit(-3.0) == (1).to_bytes(4, "big")
    assert encode_limit(1e9) == (3_600_000).to_bytes(4, "big")
