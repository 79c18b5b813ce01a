"""A client that dies with unread requests does not take the server's process with it."""

import subprocess
import sys

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
