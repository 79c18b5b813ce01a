"""The measuring process: a task on standard input, events on standard output.

A process of its own, so that a GPU which faults or hangs takes this one along and not the
diagnosis. When its parent is gone it ends at its next event.
"""

import os
import sys
import time
from collections.abc import Callable

import msgspec

from kvxfer.diagnose.measure.cuda_node import CudaNode
from kvxfer.diagnose.measure.events import Ended, Event, Skipped, Task
from kvxfer.diagnose.measure.host import measure_host
from kvxfer.diagnose.measure.host_device import measure_host_device
from kvxfer.diagnose.measure.nics import measure_nic
from kvxfer.diagnose.measure.pairs import measure_crowds, measure_pairs
from kvxfer.diagnose.measure.schedule import Schedule
from kvxfer.errors import KvxferError

_STDOUT, _STDERR = 1, 2
_encoder = msgspec.json.Encoder()


def main() -> int:
    """Measure what is asked for."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    events = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)  # what libraries print is no event

    def say(event: Event) -> None:
        line = memoryview(_encoder.encode(event) + b"\n")
        while line:
            line = line[os.write(events, line) :]

    run_task(task, say)
    return 0


def run_task(task: Task, emit: Callable[[Event], None]) -> None:
    """All measurements of a task: the GPUs', then the host's; or those of a NIC alone."""
    deadline_s = time.monotonic() + task.budget_s
    schedule = Schedule(emit, task.rounds, deadline_s)
    if task.nic:
        measure_nic(task, schedule)
        emit(Ended())
        return
    if task.devices:
        try:
            _measure_gpus(task, schedule)
        except KvxferError as error:
            emit(Skipped("pairs of GPUs", str(error)))
            emit(Skipped("host and GPUs", str(error)))
    measure_host(task, schedule)
    emit(Ended())


def _measure_gpus(task: Task, schedule: Schedule) -> None:
    node = CudaNode(task.devices, task.area_bytes, task.num_queued)
    measure_pairs(node, schedule)
    measure_crowds(node, schedule)
    measure_host_device(node.memory, task, schedule)


if __name__ == "__main__":
    sys.exit(main())
