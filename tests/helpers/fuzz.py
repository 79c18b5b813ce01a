"""Mutated messages against a serving channel: everybody else is served, and every answer is sound.

By hand, for as many messages as one likes: ``python tests/helpers/fuzz.py --messages 1000000``.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import zmq
from leaks import private_bytes
from mutations import mutate
from small_servers import layout, serving
from zmtp import GREETING, READY, raw_dealer

from kvxfer import Endpoint
from kvxfer.control import (
    AbortRequest,
    CommitRequest,
    ControlServer,
    Done,
    ErrorReply,
    InitReply,
    InitRequest,
    LeaveRequest,
    ReserveReply,
    ReserveRequest,
    decode,
    encode,
)
from kvxfer.control.framing import encode_limit, is_ours
from kvxfer.session.layouts import layout_spec, rank_spec

_WINDOW = 8  # unanswered messages at a time; a server keeps 16 answers for a connection
_RAW_EVERY = 500  # messages through a socket for each that is spoiled on the wire
_STUCK_S = 30.0
_MAX_CALL_ID_BYTES = 32


@dataclass
class FuzzReport:
    """What became of the messages of one channel."""

    num_sent: int = 0
    num_raw: int = 0
    answers: Counter[str] = field(default_factory=Counter)  # by type, errors by kind
    num_silent: int = 0  # rightly not answered
    seconds: float = 0.0
    grown_bytes: int = 0

    def __str__(self) -> str:
        answers = ", ".join(f"{kind} {count}" for kind, count in sorted(self.answers.items()))
        return (
            f"{self.num_sent} messages and {self.num_raw} spoiled connections in "
            f"{self.seconds:.0f} s; {self.num_silent} dropped, answered: {answers}; "
            f"memory {self.grown_bytes >> 10:+d} KiB"
        )


def fuzz_channel(
    server: ControlServer,
    channel: str,
    samples: Sequence[msgspec.Struct],
    reply_types: tuple[type[msgspec.Struct], ...],
    *,
    num_messages: int,
    seed: int,
) -> FuzzReport:
    """Send wrong versions of ``samples``, and check each answer and each silence.

    Raises:
        AssertionError: a message without its answer, an answer without its message, one that does
            not decode, or an error of the server's own.
    """
    random_ = random.Random(seed)
    address = server.addresses[channel]
    report = FuzzReport()
    dropped, memory, start_s = server.dropped[channel], private_bytes(), time.monotonic()
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(address)
    waiting: set[bytes] = set()
    try:
        for number in range(num_messages):
            parts = mutated(samples, number, random_)
            dealer.send_multipart(parts)
            report.num_sent += 1
            if is_answered(parts):
                waiting.add(parts[0])
            else:
                report.num_silent += 1
            while len(waiting) >= _WINDOW:
                take_answer(dealer, waiting, reply_types, report)
            if number % _RAW_EVERY == 0:
                spoil_connection(int(address.rpartition(":")[2]), parts, random_)
                report.num_raw += 1
        # Whole and last: when it is answered, all before it have been read.
        parts = [num_messages.to_bytes(8, "big"), *encode(samples[0]), encode_limit(_STUCK_S)]
        dealer.send_multipart(parts)
        waiting.add(parts[0])
        while waiting:
            take_answer(dealer, waiting, reply_types, report)
    finally:
        context.destroy(linger=0)
    # A spoiled connection may hold whole messages, which are dropped too.
    num_dropped = server.dropped[channel] - dropped
    assert num_dropped >= report.num_silent, f"{num_dropped} of {report.num_silent} were dropped"
    report.seconds = time.monotonic() - start_s
    report.grown_bytes = private_bytes() - memory
    return report


def mutated(samples: Sequence[msgspec.Struct], number: int, random_: random.Random) -> list[bytes]:
    """The parts of one message, of which most often the body is wrong, at times another part."""
    head, body = encode(random_.choice(samples))
    parts = [number.to_bytes(8, "big"), head, body, encode_limit(random_.random())]
    kind = random_.randrange(10)
    if kind < 7:
        parts[2] = mutate(body, random_)
    elif kind == 7:
        index = random_.choice((1, 3))
        parts[index] = random_.choice((b"", random_.randbytes(6), flipped(parts[index], random_)))
    elif kind == 8:
        del parts[random_.randrange(1, len(parts)) :]
    else:
        parts.insert(random_.randrange(1, 5), random_.randbytes(random_.choice((0, 1, 6, 4096))))
    return parts


def flipped(data: bytes, random_: random.Random) -> bytes:
    spoiled = bytearray(data)
    spoiled[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
    return bytes(spoiled)


def is_answered(parts: Sequence[bytes]) -> bool:
    """Whether the protocol gives an answer to these parts: they have a call id and a head."""
    return len(parts) >= 2 and 1 <= len(parts[0]) <= _MAX_CALL_ID_BYTES and is_ours(parts[1])


def take_answer(
    dealer: "zmq.Socket[bytes]",
    waiting: set[bytes],
    reply_types: tuple[type[msgspec.Struct], ...],
    report: FuzzReport,
) -> None:
    assert dealer.poll(int(_STUCK_S * 1000)), f"{len(waiting)} messages are not answered"
    call_id, *frames = dealer.recv_multipart()
    if not call_id:
        return  # a probe
    assert call_id in waiting, f"an answer to {call_id!r}, which does not wait for one"
    waiting.remove(call_id)
    reply = decode(frames, (*reply_types, ErrorReply))
    if not isinstance(reply, ErrorReply):
        report.answers[type(reply).__name__] += 1
        return
    assert not reply.message.startswith("internal error"), reply.message
    report.answers[reply.kind] += 1


def spoil_connection(port: int, parts: Sequence[bytes], random_: random.Random) -> None:
    """The same message on the wire of a connection of its own, spoiled there."""
    wire = b"".join(
        bytes([(index < len(parts) - 1) | 2]) + len(part).to_bytes(8, "big") + part
        for index, part in enumerate(parts)
    )
    with suppress(ConnectionError), raw_dealer(port, timeout_s=_STUCK_S) as raw:
        raw.sendall(mutate_wire(wire, random_))
    with suppress(ConnectionError), raw_dealer(port, timeout_s=_STUCK_S) as raw:
        raw.sendall(mutate_wire(GREETING + READY + wire, random_))


def mutate_wire(wire: bytes, random_: random.Random) -> bytes:
    cut = wire[: random_.randrange(1, len(wire) + 1)]
    return flipped(cut, random_) if random_.random() < 0.5 else cut


def endpoint_samples(
    endpoint: Endpoint,
) -> dict[str, tuple[Sequence[msgspec.Struct], tuple[type[msgspec.Struct], ...]]]:
    """For each channel of an endpoint, requests that it grants, and the types of its answers."""
    shard = endpoint.cache.shard
    epoch = endpoint._epoch
    init = InitRequest(
        incarnation="p-1",
        layout=layout_spec(shard.model),
        rank=rank_spec(shard.rank),
        transports=[endpoint.transport_name],
    )
    reserve = ReserveRequest(request_id="r-1", num_blocks=2, epoch=epoch, incarnation="p-1")
    commit, abort = CommitRequest("r-1", "p-1"), AbortRequest("r-1", "p-1")
    return {
        "init": ([init], (InitReply,)),
        "alloc": ([abort, reserve, commit, LeaveRequest("p-1")], (ReserveReply, Done)),
    }


def fuzz_endpoint(endpoint: Endpoint, *, num_messages: int, seed: int) -> dict[str, FuzzReport]:
    """`fuzz_channel` of each channel of an endpoint."""
    return {
        channel: fuzz_channel(
            endpoint._server, channel, samples, replies, num_messages=num_messages, seed=seed
        )
        for channel, (samples, replies) in endpoint_samples(endpoint).items()
    }


def main() -> None:
    """Fuzz the channels of an endpoint and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000, help="for each channel")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with serving(layout()) as endpoint:
        reports = fuzz_endpoint(endpoint, num_messages=options.messages, seed=options.seed)
    for channel, report in reports.items():
        sys.stdout.write(f"{channel}: {report}\n")


if __name__ == "__main__":
    main()
