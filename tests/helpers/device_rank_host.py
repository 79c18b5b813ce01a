"""A `RankHost` whose memory is a GPU's. Also the program of a child, as `rank_host.py` is."""

from typing import Any

import cuda_driver
from cache_content import GUARD_BYTES, Bytes, private_array
from peer_host import serve
from rank_host import RankHost

from kvxfer import _core
from kvxfer.memory import Buffer, MemoryKind


class DeviceRankHost(RankHost):
    """A rank on a GPU; ``memory`` says which: ``cuda:1``."""

    def _allocate(self, memory: str, num_bytes: int) -> Bytes:
        self._device = int(memory.partition(":")[2])
        self._buffer = _core.DeviceBuffer(self._device, num_bytes)
        return private_array(num_bytes)

    def _arrays(self, num_arrays: int) -> Any:
        cuda_driver.write(self._device, self._buffer.address, self.memory.raw)
        length = self.memory.inner.size // num_arrays
        first = self._buffer.address + GUARD_BYTES
        return [
            Buffer(first + at * length, length, MemoryKind.DEVICE, self._device, self._buffer)
            for at in range(num_arrays)
        ]

    def problem(self) -> str:
        self.memory.raw[:] = cuda_driver.read(
            self._device, self._buffer.address, self.memory.raw.size
        )
        return super().problem()


if __name__ == "__main__":
    serve(DeviceRankHost())
