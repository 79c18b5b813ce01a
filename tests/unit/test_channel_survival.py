"""A server outlives what happens to its clients and to itself."""

import subprocess
import sys

from waiting import eventually

from kvxfer.control import ControlClient, ControlServer, Done, LeaveRequest

# Full queues, heartbeats and a peer that has gone abort the process in libzmq 4.3.5.
SERVER = """
import subprocess, sys, time
from kvxfer.control import ControlClient, ControlServer, Done, LeaveRequest

waits = [4.0]

def slow(request):
    time.sleep(waits.pop() if waits else 0.0)
    return Done(request.incarnation)

served = ControlServer({"busy": {LeaveRequest: slow}, "other": {LeaveRequest: lambda r: Done("x")}})
client = subprocess.Popen([sys.executable, "-c", sys.argv[1], served.addresses["busy"]])
client.wait()
time.sleep(2.0)
with ControlClient(served.addresses["other"], Done, deadline_s=60.0) as caller:
    caller.call(LeaveRequest("y"))
served.close()
print("alive", flush=True)
"""
CLIENT = """
import os, signal, sys, time, zmq
from kvxfer.control import LeaveRequest
from kvxfer.control.framing import encode, encode_limit

socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
for number in range(16):
    socket.send_multipart([b"%d" % number, *encode(LeaveRequest("z")), encode_limit(5.0)])
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_client_that_dies_with_unread_requests() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVER, CLIENT], capture_output=True, text=True, timeout=110
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_a_step_that_fails_is_not_the_last() -> None:
    calls = []

    def tick(now_s: float) -> float:
        calls.append(now_s)
        if len(calls) < 3:
            raise OSError("too many open files")
        return now_s + 0.01

    answers = {"busy": {LeaveRequest: lambda request: Done(request.incarnation)}}
    with (
        ControlServer(answers, on_time=tick) as served,
        ControlClient(served.addresses["busy"], Done) as client,
    ):
        assert client.call(LeaveRequest("y")) == Done("y")
        eventually(lambda: len(calls) > 4, "no tick after one that failed")
        assert client.call(LeaveRequest("z")) == Done("z")
