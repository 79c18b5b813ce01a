"""One alloc channel and its callers, a process each; `bench_control.py` runs them.

python bench/control_load.py serve
python bench/control_load.py call ADDRESS NAME NUM_REQUESTS NUM_BLOCKS
"""

import array
import sys
import time

from kvxfer.control import (
    CommitRequest,
    ControlClient,
    ControlServer,
    Done,
    ReserveReply,
    ReserveRequest,
    TableSpec,
)
from kvxfer.session.block_pool import BlockPool

POOL_BLOCKS = 1 << 16
WARM_UP = 200


def serve() -> None:
    """Grant blocks and take them back at the commit, as an engine that is done at once.

    Writes the address, and at the end of its input how many blocks are free and how many calls
    there were.
    """
    pool = BlockPool(POOL_BLOCKS)
    num_calls = 0

    def reserve(request: ReserveRequest) -> ReserveReply:
        nonlocal num_calls
        num_calls += 1
        ids = pool.reserve(request.incarnation, request.request_id, request.num_blocks)
        if ids is None:
            return ReserveReply(request_id=request.request_id, state="wait", retry_after_s=0.01)
        return ReserveReply(request_id=request.request_id, state="granted", tables=[TableSpec(ids)])

    def commit(request: CommitRequest) -> Done:
        nonlocal num_calls
        num_calls += 1
        pool.commit(request.incarnation, request.request_id)
        pool.release(request.incarnation, request.request_id)
        return Done(request.request_id)

    with ControlServer({"alloc": {ReserveRequest: reserve, CommitRequest: commit}}) as server:
        write_line(server.addresses["alloc"])
        sys.stdin.read()
        write_line(f"{pool.num_free} {num_calls}")


def call(address: str, name: str, num_requests: int, num_blocks: int) -> None:
    """Reserve and commit one request after the other, once a line has come.

    Writes when it was ready, and at the end the seconds of every call as doubles.
    """
    taken_s = array.array("d")
    with ControlClient(address, (ReserveReply, Done)) as client:
        for number in range(-WARM_UP, num_requests):
            if number == 0:
                write_line("ready")
                sys.stdin.readline()
            request_id = f"request-{number}"
            begin_s = time.perf_counter()
            reply = client.call(
                ReserveRequest(
                    request_id=request_id, num_blocks=num_blocks, epoch=0, incarnation=name
                )
            )
            middle_s = time.perf_counter()
            client.call(CommitRequest(request_id, name))
            end_s = time.perf_counter()
            if not isinstance(reply, ReserveReply) or len(reply.block_ids) != num_blocks:
                raise SystemExit(f"{request_id}: {reply}")
            if number >= 0:
                taken_s.extend((middle_s - begin_s, end_s - middle_s))
    sys.stdout.buffer.write(taken_s.tobytes())


def write_line(text: str) -> None:
    """A line that the parent sees at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        call(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
