"""One cache in device memory and its endpoint: what `PeerHost` is for host memory.

Also the program of a child (``python device_host.py``), which talks as `peer_host.py` does.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import cuda_driver
import numpy as np
from cache_content import GUARD_BYTES, Bytes, CacheShape, check_content
from gpu_needs import array_library
from peer_host import PeerHost, serve

from kvxfer import Endpoint, KVCache, KVLayout, _core
from kvxfer.memory import Buffer, MemoryKind
from kvxfer.memory.ipc import DeviceExport

_CHUNK_BYTES = 2 << 20  # the smallest chunk that CUDA maps


class DeviceMemory:
    """Device memory of ``cuda`` (cudaMalloc), ``vmm`` (chunks), ``torch`` or ``cupy``.

    Attributes:
        address: its first byte.
        owner: what keeps it, a tensor for torch.
    """

    def __init__(self, kind: str, device: int, num_bytes: int) -> None:
        self._device = device
        self.owner: Any
        if kind == "torch":
            torch = array_library("torch")
            self.owner = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{device}")
            self.address: int = self.owner.data_ptr()
        elif kind == "cupy":
            cupy = array_library("cupy")
            with cupy.cuda.Device(device):
                self.owner = cupy.empty(num_bytes, cupy.uint8)
            self.address = self.owner.data.ptr
        elif kind == "vmm":
            self.owner = cuda_driver.VirtualMemory(device, -(-num_bytes // _CHUNK_BYTES))
            self.address = self.owner.address
        else:
            assert kind == "cuda", kind
            self.owner = _core.DeviceBuffer(device, num_bytes)
            self.address = self.owner.address
        self._is_array = kind in ("torch", "cupy")

    def cut(self, begin: int, num_bytes: int, *, owned: bool = True) -> Any:
        """A part of it, as something to register."""
        if self._is_array:
            return self.owner[begin : begin + num_bytes]
        return Buffer(
            self.address + begin,
            num_bytes,
            MemoryKind.DEVICE,
            self._device,
            self.owner if owned else None,
        )


class DeviceHost(PeerHost):
    """A cache in device memory with guards, and the endpoint that serves it.

    ``_raw`` is a copy of the memory on the host: what was last written there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = 0
        self.memory: list[DeviceMemory] = []
        self._addresses: list[int] = []
        self._contents: dict[int, Bytes] = {}
        self._model: Bytes

    def open(  # type: ignore[override]
        self,
        *,
        layout: dict[str, Any],
        num_blocks: int,
        num_arrays: int,
        memory: str,
        transport: str,
        seed: int | None,
        device: int = 0,
        owned: bool = True,
    ) -> dict[str, Any]:
        """Make the memory, fill it, register it and serve it.

        ``memory`` is a kind of `DeviceMemory`: one allocation for all arrays, or with ``-each``
        appended one for every array. Without a seed it stays as it is.
        """
        self.shape = shape = CacheShape(tuple(layout.items()), num_blocks, num_arrays)
        self.device = device
        self._contents = {}
        kind, _, each = memory.partition("-")
        per_allocation = 1 if each else num_arrays
        self.memory = [
            DeviceMemory(kind, device, per_allocation * shape.raw_bytes)
            for _ in range(num_arrays // per_allocation)
        ]
        places = [divmod(index, per_allocation) for index in range(num_arrays)]
        places = [(which, position * shape.raw_bytes) for which, position in places]
        self._addresses = [self.memory[which].address + begin for which, begin in places]
        if seed is not None:
            self.fill(seed)
        arrays = [
            self.memory[which].cut(begin + GUARD_BYTES, shape.array_bytes, owned=owned)
            for which, begin in places
        ]
        self.cache = KVCache(KVLayout(**layout), arrays)
        self.endpoint = Endpoint(self.cache, transport=transport)
        return {
            "addresses": self.endpoint.addresses,
            "incarnation": self.endpoint.incarnation,
        }

    def close(self) -> None:
        super().close()
        self.free_memory()

    def free_memory(self) -> None:
        """Let go of the memory, registered or not."""
        for one in self.memory:
            if isinstance(one.owner, cuda_driver.VirtualMemory):
                one.owner.free()
        self.memory = []

    def fill(self, seed: int) -> None:
        """Write the bytes of ``seed`` over pages and guards."""
        self._model = self._content(seed)
        self._raw = list(self._model.copy())
        self.upload()

    def upload(self) -> None:
        """Write the copy on the host to the device."""
        for address, raw in zip(self._addresses, self._raw, strict=True):
            cuda_driver.write(self.device, address, raw)

    def content(self) -> Bytes:
        return np.stack(
            [
                cuda_driver.read(self.device, address, self.shape.raw_bytes)
                for address in self._addresses
            ]
        )

    def copied_in(self, src_seed: int, src_ids: list[int], dst_ids: list[int]) -> None:
        """Note that blocks of a cache filled with ``src_seed`` should have come in."""
        content = self._content(src_seed)
        self._model = self.shape.copied(content, self._model, src_ids, dst_ids)

    def problem(self) -> str:
        """Where the memory differs from what it should hold, guards included; empty if nowhere."""
        try:
            check_content(self.shape, self.content(), self._model)
        except AssertionError as error:
            return str(error)
        return ""

    def _content(self, seed: int) -> Bytes:
        if seed not in self._contents:
            self._contents[seed] = self.shape.content(seed)
        return self._contents[seed]

    def stamp(self, round_number: int, block_ids: list[int]) -> None:
        self.stamp_host_copy(round_number, block_ids)
        self.upload()

    def stamp_host_copy(self, round_number: int, block_ids: list[int]) -> None:
        """As `stamp`, but whoever calls brings the bytes to the device."""
        super().stamp(round_number, block_ids)

    def expect(
        self,
        *,
        incarnation: str,
        sequence: int,
        round_number: int,
        src_block_ids: list[int],
        dst_block_ids: list[int],
        timeout_s: float,
        announce: Callable[[], None],
    ) -> dict[str, Any]:
        """Wait for a transfer, at once read the memory, and compare that with the source's stamps.

        The copy engine reads it: unlike a kernel it need not wait for the other process's turn.
        """
        planes = range(self.shape.num_planes)
        wanted = [
            [self._stamped(round_number, plane, block) for block in src_block_ids]
            for plane in planes
        ]
        announce()
        signalled = self.endpoint.wait(incarnation, sequence, timeout_s=timeout_s)
        self._raw = list(self.content())
        found = self._planes()
        num_stale = sum(
            not np.array_equal(found[plane][block], wanted[plane][index])
            for plane in planes
            for index, block in enumerate(dst_block_ids)
        )
        return {"signalled": signalled, "num_stale": num_stale}

    def fill_pattern(self, seed: int) -> None:
        """Fill every page by a kernel, for caches too large to check on the host."""
        ids = np.arange(self.cache.num_blocks)
        _core.pattern_fill_device(self.device, self._pattern(ids), seed)

    def num_wrong_words(self, seed: int, except_ids: list[int]) -> int:
        """Words of all blocks but some that are not as `fill_pattern` left them."""
        ids = np.setdiff1d(np.arange(self.cache.num_blocks), except_ids)
        found = _core.pattern_check_device(self.device, self._pattern(ids), seed)
        return int(found.num_wrong_words)

    def _pattern(self, ids: Any) -> _core.PatternTables:
        view = self.cache.view
        layout, addresses = view.layout, view.addresses.reshape(-1)
        return _core.PatternTables(
            addresses,
            np.arange(addresses.size, dtype=np.uint64) << np.uint64(48),
            ids.astype(np.uint64) * np.uint64(view.block_stride_bytes),
            ids.astype(np.uint64) * np.uint64(layout.block_size),
            np.full(ids.size, layout.block_size, np.uint32),
            view.token_stride_bytes,
            view.head_stride_bytes,
            layout.num_kv_heads,
            0,
            layout.vector_bytes,
        )

    def digests(self, block_ids: list[int]) -> list[str]:
        """Of each block in plane 0, a digest of its bytes."""
        view = self.cache.view
        first = int(view.addresses[0, 0])
        page_bytes = view.layout.page_bytes
        pages = [
            cuda_driver.read(self.device, first + b * page_bytes, page_bytes) for b in block_ids
        ]
        return [hashlib.sha256(page.tobytes()).hexdigest() for page in pages]

    def exported(self) -> dict[str, Any]:
        """How the first array crosses to other processes."""
        spec = DeviceExport(self.cache.registrations[0]).spec
        return {"legacy": bool(spec.legacy_handle), "num_chunks": len(spec.chunk_fds)}

    def uuid(self) -> str:
        """The GPU that the cache is on."""
        return _core.device_info(self.device).uuid

    def connect(self, addresses: dict[str, str]) -> str:
        """Connect to another host's endpoint and let go again; returns the path."""
        with self.endpoint.connect(addresses) as peer:
            return peer.link.path


if __name__ == "__main__":
    serve(DeviceHost())
