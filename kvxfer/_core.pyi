"""
The native core of kvxfer. Private: use the rooms of the package.
"""
from __future__ import annotations
import collections.abc
import numpy
import numpy.typing
import typing
import typing_extensions
__all__: list[str] = ['ArrayInfo', 'BuildInfo', 'CompletionBoard', 'CopyEngine', 'CopyFault', 'DeviceBuffer', 'DeviceCopier', 'DeviceInfo', 'IpcExport', 'IpcMapping', 'PatternMismatch', 'PatternTables', 'PlanTables', 'PointerInfo', 'ProcessIdentity', 'SharedSegment', 'WorkerPool', 'buffer_id', 'build_info', 'can_access_peer', 'device_count', 'device_info', 'no_device_reason', 'paged_copy_host', 'paged_copy_process_vm', 'pattern_check_device', 'pattern_check_host', 'pattern_fill_device', 'pattern_fill_host', 'pointer_info', 'process_identity', 'read_dlpack', 'require_same_process']
class BuildInfo:
    """
    How this core was built.
    """
    @property
    def compiler(self) -> str:
        ...
    @property
    def cuda_architectures(self) -> str:
        ...
    @property
    def cuda_version(self) -> str:
        ...
    @property
    def has_cuda(self) -> bool:
        ...
    @property
    def version(self) -> str:
        ...
class ArrayInfo:
    """
    Address, size and device of an array.
    """
    @property
    def address(self) -> int:
        ...
    @property
    def contiguous(self) -> bool:
        ...
    @property
    def device_id(self) -> int:
        ...
    @property
    def device_type(self) -> int:
        ...
    @property
    def itemsize_bytes(self) -> int:
        ...
    @property
    def num_bytes(self) -> int:
        ...
class SharedSegment:
    """
    Sealed anonymous memory that several processes map.
    """
    @staticmethod
    def create(num_bytes: typing.SupportsInt | typing.SupportsIndex) -> SharedSegment:
        ...
    @staticmethod
    def open(pid: typing.SupportsInt | typing.SupportsIndex, fd: typing.SupportsInt | typing.SupportsIndex, num_bytes: typing.SupportsInt | typing.SupportsIndex) -> SharedSegment:
        ...
    @property
    def address(self) -> int:
        ...
    @property
    def fd(self) -> int:
        ...
    @property
    def num_bytes(self) -> int:
        ...
class ProcessIdentity:
    """
    A process told apart from all others on this host.
    """
    def __init__(self, pid: typing.SupportsInt | typing.SupportsIndex, start_ticks: typing.SupportsInt | typing.SupportsIndex, pid_namespace: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def pid(self) -> int:
        ...
    @property
    def pid_namespace(self) -> int:
        ...
    @property
    def start_ticks(self) -> int:
        ...
class CompletionBoard:
    """
    Sequence numbers in shared memory that say: the data is visible.
    """
    SLOT_BYTES: typing.ClassVar[int] = 64
    def __init__(self, address: typing.SupportsInt | typing.SupportsIndex, num_slots: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def load(self, slot: typing.SupportsInt | typing.SupportsIndex) -> int:
        ...
    def signal(self, slot: typing.SupportsInt | typing.SupportsIndex, sequence: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def slot_address(self, slot: typing.SupportsInt | typing.SupportsIndex) -> int:
        ...
    def wait(self, slot: typing.SupportsInt | typing.SupportsIndex, sequence: typing.SupportsInt | typing.SupportsIndex, timeout_s: typing.SupportsFloat | typing.SupportsIndex) -> bool:
        ...
    @property
    def num_slots(self) -> int:
        ...
class WorkerPool:
    """
    Threads that share one copy at a time.
    """
    def __init__(self, num_threads: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def num_threads(self) -> int:
        ...
class PlanTables:
    """
    The tables of a copy plan, kept alive: four 1-D uint64 arrays.
    """
    def __init__(self, src_planes: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64], dst_planes: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64], src_offsets: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64], dst_offsets: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64], page_bytes: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
class PatternTables:
    """
    Pages that carry the test pattern: four 1-D uint64 arrays.
    """
    def __init__(self, planes: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64], plane_keys: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64], offsets: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64], block_keys: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64], page_bytes: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
class PatternMismatch:
    """
    What a pattern check found.
    """
    @property
    def first_page(self) -> int:
        ...
    @property
    def num_wrong_words(self) -> int:
        ...
class DeviceInfo:
    """
    One GPU as the CUDA runtime describes it.
    """
    @property
    def compute_major(self) -> int:
        ...
    @property
    def compute_minor(self) -> int:
        ...
    @property
    def index(self) -> int:
        ...
    @property
    def memory_bytes(self) -> int:
        ...
    @property
    def memory_gb_per_s(self) -> float:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def num_sms(self) -> int:
        ...
    @property
    def pci_bus_id(self) -> str:
        ...
    @property
    def uuid(self) -> str:
        ...
class PointerInfo:
    """
    The allocation behind a device address.
    """
    @property
    def base(self) -> int:
        ...
    @property
    def buffer_id(self) -> int:
        ...
    @property
    def device(self) -> int:
        ...
    @property
    def legacy_ipc(self) -> bool:
        ...
    @property
    def num_bytes(self) -> int:
        ...
class DeviceBuffer:
    """
    Device memory from cudaMalloc.
    """
    def __init__(self, device: typing.SupportsInt | typing.SupportsIndex, num_bytes: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def address(self) -> int:
        ...
    @property
    def device(self) -> int:
        ...
    @property
    def num_bytes(self) -> int:
        ...
class IpcExport:
    """
    A device range made openable for other processes.
    """
    def __init__(self, address: typing.SupportsInt | typing.SupportsIndex, num_bytes: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def buffer_id(self) -> int:
        ...
    @property
    def chunk_bytes(self) -> list[int]:
        ...
    @property
    def chunk_fds(self) -> list[int]:
        ...
    @property
    def device(self) -> int:
        ...
    @property
    def legacy_handle(self) -> bytes:
        ...
    @property
    def offset_bytes(self) -> int:
        ...
class IpcMapping:
    """
    A peer's allocation mapped for a local device.
    """
    @staticmethod
    def open_chunks(device: typing.SupportsInt | typing.SupportsIndex, pid: typing.SupportsInt | typing.SupportsIndex, fds: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], chunk_bytes: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> IpcMapping:
        ...
    @staticmethod
    def open_legacy(device: typing.SupportsInt | typing.SupportsIndex, handle: bytes, num_bytes: typing.SupportsInt | typing.SupportsIndex) -> IpcMapping:
        ...
    @property
    def address(self) -> int:
        ...
    @property
    def num_bytes(self) -> int:
        ...
class CopyEngine:
    """
    What carries a device copy.
    
    Members:
    
      AUTO
    
      BULK
    
      LOAD_STORE
    
      DMA
    """
    AUTO: typing.ClassVar[CopyEngine]
    BULK: typing.ClassVar[CopyEngine]
    DMA: typing.ClassVar[CopyEngine]
    LOAD_STORE: typing.ClassVar[CopyEngine]
    __members__: typing.ClassVar[dict[str, CopyEngine]]
    @typing.overload
    def __eq__(self, other: CopyEngine) -> bool:
        ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool:
        ...
    def __getstate__(self) -> int:
        ...
    def __hash__(self) -> int:
        ...
    def __index__(self) -> int:
        ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def __int__(self) -> int:
        ...
    @typing.overload
    def __ne__(self, other: CopyEngine) -> bool:
        ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool:
        ...
    def __repr__(self) -> str:
        ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def __str__(self) -> str:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def value(self) -> int:
        ...
class CopyFault:
    """
    Planted faults, for tests alone.
    
    Members:
    
      NONE
    
      DELAY_BLOCK_0
    
      SIGNAL_EARLY
    """
    DELAY_BLOCK_0: typing.ClassVar[CopyFault]
    NONE: typing.ClassVar[CopyFault]
    SIGNAL_EARLY: typing.ClassVar[CopyFault]
    __members__: typing.ClassVar[dict[str, CopyFault]]
    @typing.overload
    def __eq__(self, other: CopyFault) -> bool:
        ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool:
        ...
    def __getstate__(self) -> int:
        ...
    def __hash__(self) -> int:
        ...
    def __index__(self) -> int:
        ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def __int__(self) -> int:
        ...
    @typing.overload
    def __ne__(self, other: CopyFault) -> bool:
        ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool:
        ...
    def __repr__(self) -> str:
        ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def __str__(self) -> str:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def value(self) -> int:
        ...
class DeviceCopier:
    """
    Runs copy plans on one GPU, in order.
    """
    def __init__(self, device: typing.SupportsInt | typing.SupportsIndex, board_address: typing.SupportsInt | typing.SupportsIndex, board_slots: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def post(self, tables: PlanTables, slot: typing.SupportsInt | typing.SupportsIndex, sequence: typing.SupportsInt | typing.SupportsIndex, num_sms: typing.SupportsInt | typing.SupportsIndex = 0, engine: CopyEngine = CopyEngine.AUTO, fault: CopyFault = CopyFault.NONE, ordered: bool = False, after_stream: typing.SupportsInt | typing.SupportsIndex = 0) -> CopyEngine:
        ...
    def set_bulk_shape(self, num_warps: typing.SupportsInt | typing.SupportsIndex, num_stages: typing.SupportsInt | typing.SupportsIndex, slot_bytes: typing.SupportsInt | typing.SupportsIndex, store_depth: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def wait(self, slot: typing.SupportsInt | typing.SupportsIndex, sequence: typing.SupportsInt | typing.SupportsIndex, timeout_s: typing.SupportsFloat | typing.SupportsIndex) -> bool:
        ...
def buffer_id(address: typing.SupportsInt | typing.SupportsIndex) -> int:
    ...
def build_info() -> BuildInfo:
    ...
def can_access_peer(from_device: typing.SupportsInt | typing.SupportsIndex, to_device: typing.SupportsInt | typing.SupportsIndex) -> bool:
    ...
def device_count() -> int:
    ...
def device_info(device: typing.SupportsInt | typing.SupportsIndex) -> DeviceInfo:
    ...
def no_device_reason() -> str:
    ...
def paged_copy_host(pool: WorkerPool, tables: PlanTables, bypass_cache: bool) -> None:
    """
    Copy between addresses that are both mapped here; returns when done.
    """
def paged_copy_process_vm(pool: WorkerPool, tables: PlanTables, pid: typing.SupportsInt | typing.SupportsIndex, remote_is_destination: bool) -> None:
    """
    Copy to or from another process by cross-memory attach; returns when done.
    """
def pattern_check_device(device: typing.SupportsInt | typing.SupportsIndex, tables: PatternTables, seed: typing.SupportsInt | typing.SupportsIndex) -> PatternMismatch:
    ...
def pattern_check_host(pool: WorkerPool, tables: PatternTables, seed: typing.SupportsInt | typing.SupportsIndex) -> PatternMismatch:
    ...
def pattern_fill_device(device: typing.SupportsInt | typing.SupportsIndex, tables: PatternTables, seed: typing.SupportsInt | typing.SupportsIndex) -> None:
    ...
def pattern_fill_host(pool: WorkerPool, tables: PatternTables, seed: typing.SupportsInt | typing.SupportsIndex) -> None:
    ...
def pointer_info(address: typing.SupportsInt | typing.SupportsIndex) -> PointerInfo:
    ...
def process_identity(pid: typing.SupportsInt | typing.SupportsIndex = 0) -> ProcessIdentity:
    ...
def read_dlpack(capsule: typing_extensions.CapsuleType) -> ArrayInfo:
    """
    Read a 'dltensor' capsule; the capsule keeps the memory alive.
    """
def require_same_process(expected: ProcessIdentity) -> None:
    ...
