"""The program that measures one case of a peer library: a task in, lines out.

It ends when its standard input does, and when a round takes minutes: a library that hangs in
native code cannot be asked to stop.
"""

import faulthandler
import os
import sys
import threading
from typing import IO

import msgspec

from kvxfer.errors import KvxferError
from kvxfer.sweep.agent_process import AgentProcess
from kvxfer.sweep.peers.measure import measure_peer
from kvxfer.sweep.peers.task import PeerTask, Said

_ROUND_S = 120.0


def main() -> int:
    """Measure the task on standard input; write to the descriptor that is the first argument."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=PeerTask)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with os.fdopen(int(sys.argv[1]), "wb", buffering=0) as out:
        _say(out, _measure(task, out))
    return 0


def _measure(task: PeerTask, out: IO[bytes]) -> Said:
    def on_round() -> None:
        faulthandler.dump_traceback_later(_ROUND_S, exit=True)
        _say(out, Said())

    faulthandler.dump_traceback_later(_ROUND_S, exit=True)
    try:
        with AgentProcess() as agent:
            return Said(result=measure_peer(task, agent, on_round))
    except KvxferError as error:
        return Said(error=type(error).__name__, message=str(error))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _say(out: IO[bytes], said: Said) -> None:
    out.write(msgspec.json.encode(said) + b"\n")


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
