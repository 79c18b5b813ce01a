"""GPUs that are not there: host memory under their names, and copies by a thread.

What a test learns here is of the Python around the kernels; of the kernels tests/gpu knows.
"""

import queue
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cache_content import GUARD_BYTES, CacheShape, private_array
from peer_host import PeerHost

from kvxfer import Endpoint, KVCache, KVLayout, _core
from kvxfer.memory import Buffer, MemoryKind
from kvxfer.transport import stream_mark
from kvxfer.transport.nixl import agent, memory, reach

NUM_GPUS = 2


class Mark:
    """A point in a pretended stream."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def is_reached(self) -> bool:
        return self.reached.is_set()


class Pretended:
    """What the pretended GPUs were asked for.

    Attributes:
        contexts: how deep each GPU's context is entered.
        marks: points in streams that were marked.
        live_bytes: of pretended device memory.
        has_legacy_ipc: what is said of all memory.
        peers: whether the GPUs reach each other.
    """

    def __init__(self) -> None:
        self.contexts = [0] * NUM_GPUS
        self.marks: list[Mark] = []
        self.live_bytes = 0
        self.has_legacy_ipc = True
        self.peers = True


class _Copier:
    def __init__(self, device: int, board_address: int, board_slots: int) -> None:
        self._flags = _core.CompletionBoard(board_address, board_slots)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def post(self, tables: Any, slot: int, sequence: int, *, num_sms: int) -> Any:
        assert num_sms > 0
        self._queue.put((tables, slot, sequence))
        return _core.CopyEngine.BULK

    def wait(self, slot: int, sequence: int, timeout_s: float) -> bool:
        return self._flags.wait(slot, sequence, timeout_s)

    def _run(self) -> None:
        pool = _core.WorkerPool(1)
        while (job := self._queue.get()) is not None:
            tables, slot, sequence = job
            _core.paged_copy_host(pool, tables, False)
            self._flags.signal(slot, sequence)

    def __del__(self) -> None:
        self._queue.put(None)
        self._thread.join()


def pretend_gpus(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    """Have two GPUs in this process; both sides of a pair must be in it."""
    state = Pretended()

    class DeviceBuffer:
        def __init__(self, device: int, num_bytes: int) -> None:
            self._array = np.zeros(num_bytes, np.uint8)
            self.address, self.num_bytes = int(self._array.ctypes.data), num_bytes
            self.device = device
            state.live_bytes += num_bytes

        def __del__(self) -> None:
            state.live_bytes -= self.num_bytes

    class DeviceContext:
        def __init__(self, device: int) -> None:
            self._device = device

        def enter(self) -> None:
            state.contexts[self._device] += 1

        def leave(self) -> None:
            state.contexts[self._device] -= 1
            assert state.contexts[self._device] >= 0

    class StreamMark(Mark):
        def __init__(self, device: int, stream: int) -> None:
            super().__init__()
            state.marks.append(self)

    def info(device: int) -> Any:
        return SimpleNamespace(uuid=f"GPU-{device}", memory_gb_per_s=0.0, pci_bus_id="")

    replaced = {
        "DeviceBuffer": DeviceBuffer,
        "DeviceContext": DeviceContext,
        "DeviceCopier": _Copier,
        "PinnedRange": lambda address, num_bytes: object(),
        "buffer_id": lambda address: 1,
        "pointer_info": lambda address: SimpleNamespace(legacy_ipc=state.has_legacy_ipc),
        "device_count": lambda: NUM_GPUS,
        "device_info": info,
        "can_access_peer": lambda near, far: state.peers,
    }
    for name, made in replaced.items():
        monkeypatch.setattr(_core, name, made)
    for module in (memory, agent):
        monkeypatch.setattr(module, "segment_of", lambda device: "DRAM")
    monkeypatch.setattr(stream_mark, "StreamMark", StreamMark)
    monkeypatch.setattr(reach, "gpu_path", lambda near, far: SimpleNamespace(limit_gb_per_s=None))
    return state


class PretendHost(PeerHost):
    """A `PeerHost` whose memory is said to be a GPU's."""

    def __init__(self, device: int) -> None:
        super().__init__()
        self.device = device

    def open(self, **args: Any) -> dict[str, Any]:
        """As of a `PeerHost`."""
        shape = CacheShape(tuple(args["layout"].items()), args["num_blocks"], args["num_arrays"])
        self.shape = shape
        self._raw = [private_array(shape.raw_bytes) for _ in range(shape.num_arrays)]
        self.fill(args["seed"])
        arrays = [
            Buffer(
                int(raw.ctypes.data) + GUARD_BYTES,
                shape.array_bytes,
                MemoryKind.HOST if self.device < 0 else MemoryKind.DEVICE,
                self.device,
                raw,
            )
            for raw in self._raw
        ]
        self.cache = KVCache(KVLayout(**args["layout"]), arrays)
        self.endpoint = Endpoint(self.cache, transport=args["transport"], num_threads=2)
        return {
            "addresses": self.endpoint.addresses,
            "incarnation": self.endpoint.incarnation,
        }
