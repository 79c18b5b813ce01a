"""What the measuring process is asked for, and what it says meanwhile: JSON, a line each."""

from typing import TypeAlias

import msgspec

from kvxfer.diagnose.facts import PcieLink
from kvxfer.diagnose.figures import Figure
from kvxfer.errors import InvalidUsage


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        devices: NVML index -> CUDA index of the GPUs; none = the host alone.
        pcis: NVML index -> PCI address.
        numa_cpus: NUMA node -> CPUs of it that may be used.
        nic: an RDMA device, which is measured instead of all else; empty = none.
        area_bytes: of each of a GPU's two areas.
        host_bytes: of a copy between processes, or between host and GPU.
        num_queued: copies of a round between GPUs, behind each other: starting one and learning of
            its end take as long as a tenth of 256 MiB over NVLink.
        num_host_queued: likewise of one between host and GPU.
        rounds: timed for each figure.
        budget_s: after so many seconds nothing new is begun.
        num_threads: of copies on CPUs.
    """

    devices: dict[int, int] = {}
    pcis: dict[int, str] = {}
    numa_cpus: dict[int, tuple[int, ...]] = {}
    nic: str = ""
    area_bytes: int
    host_bytes: int
    num_queued: int = 1
    num_host_queued: int = 1
    rounds: int
    budget_s: float
    num_threads: int


class Begun(msgspec.Struct, frozen=True, tag=True):
    """A measurement begins: where the process ends or hangs after this, it was that."""

    kind: str
    src: str
    dst: str


class Measured(msgspec.Struct, frozen=True, tag=True):
    """A figure."""

    figure: Figure


class BusyPcie(msgspec.Struct, frozen=True, tag=True):
    """The PCIe link of a GPU right after copies."""

    gpu: int
    link: PcieLink


class Skipped(msgspec.Struct, frozen=True, tag=True):
    """Not measured, and why."""

    what: str
    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """All was measured that could be."""


Event: TypeAlias = Begun | Measured | BusyPcie | Skipped | Ended
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def decode_event(line: bytes) -> Event:
    """An event from its line.

    Raises:
        InvalidUsage: it is none.
    """
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise InvalidUsage(f"the measuring process said {line[:80]!r}: {error}") from error
