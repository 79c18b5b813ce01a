"""
The native core of kvxfer. Private: use the rooms of the package.
"""
from __future__ import annotations
import collections.abc
import numpy
import numpy.typing
import typing
import typing_extensions
__all__: list[str] = ['ArrayInfo', 'BuildInfo', 'ChaseResult', 'CompletionBoard', 'CopyEngine', 'CopyFault', 'DescriptorList', 'DeviceBuffer', 'DeviceContext', 'DeviceCopier', 'DeviceInfo', 'IpcExport', 'IpcMapping', 'ListPlan', 'PatternMismatch', 'PatternTables', 'PinnedRange', 'PlanTables', 'PointerInfo', 'ProcessIdentity', 'SharedSegment', 'StreamMark', 'UcxContext', 'UcxLink', 'UcxMemory', 'UcxServer', 'UcxSettings', 'WorkerPool', 'buffer_id', 'build_info', 'can_access_peer', 'chase_pointers', 'device_count', 'device_info', 'enable_peer_access', 'no_device_reason', 'paged_copy_host', 'paged_copy_process_vm', 'pattern_check_device', 'pattern_check_host', 'pattern_fill_device', 'pattern_fill_host', 'pointer_info', 'process_identity', 'read_dlpack', 'require_same_process', 'ucx_load']
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
    A copy plan's tables, kept alive: planes uint64 [P], segments uint32 [S, 4] (src_block,
    dst_block, src_slot, dst_slot), boxes uint64 [B, 19] (first_plane, num_planes,
    first_segment, num_segments, src_block_stride, dst_block_stride, src_slot_stride,
    dst_slot_stride, outer_count, outer_src_stride, outer_dst_stride, inner_count,
    inner_src_stride, inner_dst_stride, run_bytes, first_scale, scale_plane_step,
    outer_scale_step, inner_scale_step; strides in bytes), inverse_scales float32 [N], all
    C-contiguous; conversion none, bfloat16 or float16 (to e4m3).
    """
    def __init__(self, src_planes: numpy.typing.NDArray[numpy.uint64], dst_planes: numpy.typing.NDArray[numpy.uint64], segments: numpy.typing.NDArray[numpy.uint32], boxes: numpy.typing.NDArray[numpy.uint64], inverse_scales: numpy.typing.NDArray[numpy.float32], conversion: str) -> None:
        ...
    @property
    def num_bytes(self) -> int:
        """
        Bytes written at the destination.
        """
class PatternTables:
    """
    Vectors that carry the test pattern: planes and plane_keys uint64 [P]; offsets and
    token_keys uint64 [S] and token_counts uint32 [S] of the segments; strides and
    vector_bytes in bytes, the latter of the source where a conversion to e4m3 lies between;
    inverse_scales float32 [P * num_heads], or nothing without a conversion.
    """
    def __init__(self, planes: numpy.typing.NDArray[numpy.uint64], plane_keys: numpy.typing.NDArray[numpy.uint64], offsets: numpy.typing.NDArray[numpy.uint64], token_keys: numpy.typing.NDArray[numpy.uint64], token_counts: numpy.typing.NDArray[numpy.uint32], token_stride: typing.SupportsInt | typing.SupportsIndex, head_stride: typing.SupportsInt | typing.SupportsIndex, num_heads: typing.SupportsInt | typing.SupportsIndex, first_head: typing.SupportsInt | typing.SupportsIndex, vector_bytes: typing.SupportsInt | typing.SupportsIndex, conversion: str = 'none', inverse_scales: numpy.typing.NDArray[numpy.float32] | None = None) -> None:
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
class DeviceContext:
    """
    A GPU's primary context: current in a thread from enter to leave.
    """
    def __init__(self, device: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def enter(self) -> None:
        ...
    def leave(self) -> None:
        ...
class PinnedRange:
    """
    Host memory that is page-locked while this lives.
    """
    def __init__(self, address: typing.SupportsInt | typing.SupportsIndex, num_bytes: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
class ChaseResult:
    """
    What a GPU read last, and how long a read took.
    """
    @property
    def last_index(self) -> int:
        ...
    @property
    def ns_per_hop(self) -> float:
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
class StreamMark:
    """
    A point in a CUDA stream's work: all that was queued on it when this object was made.
    """
    def __init__(self, device: typing.SupportsInt | typing.SupportsIndex, stream: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def is_reached(self) -> bool:
        """
        Whether the work before the mark is done.
        """
    @property
    def device(self) -> int:
        ...
class DeviceCopier:
    """
    Runs copy plans on one GPU, in order.
    """
    MAX_IN_FLIGHT: typing.ClassVar[int] = 64
    def __init__(self, device: typing.SupportsInt | typing.SupportsIndex, board_address: typing.SupportsInt | typing.SupportsIndex, board_slots: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def post(self, tables: PlanTables, slot: typing.SupportsInt | typing.SupportsIndex, sequence: typing.SupportsInt | typing.SupportsIndex, num_sms: typing.SupportsInt | typing.SupportsIndex = 0, engine: CopyEngine = CopyEngine.AUTO, fault: CopyFault = CopyFault.NONE, after: StreamMark | None = None) -> CopyEngine:
        ...
    def set_bulk_shape(self, num_warps: typing.SupportsInt | typing.SupportsIndex, num_stages: typing.SupportsInt | typing.SupportsIndex, slot_bytes: typing.SupportsInt | typing.SupportsIndex, store_depth: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def wait(self, slot: typing.SupportsInt | typing.SupportsIndex, sequence: typing.SupportsInt | typing.SupportsIndex, timeout_s: typing.SupportsFloat | typing.SupportsIndex) -> bool:
        ...
class DescriptorList:
    """
    One side's descriptors: rows uint64 [n, 3] (address, bytes, device); ranges uint64 [m, 3]
    (begin, end, shift modulo 2^64), sorted, one of which holds each descriptor.
    """
    def __init__(self, rows: numpy.typing.NDArray[numpy.uint64], ranges: numpy.typing.NDArray[numpy.uint64]) -> None:
        ...
    def __len__(self) -> int:
        ...
    def place_on(self, device: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Copy the addresses to a GPU, which looks them up there from then on.
        """
    @property
    def ranges_used(self) -> list[int]:
        """
        Which ranges hold a descriptor, by their places in the table.
        """
class ListPlan:
    """
    Chosen descriptors of one list to as many of another; indices are int64 [n]. It keeps the
    lists alive.
    """
    def __init__(self, src: DescriptorList, src_indices: numpy.typing.NDArray[numpy.int64], dst: DescriptorList, dst_indices: numpy.typing.NDArray[numpy.int64]) -> None:
        ...
    def copy_host(self, pool: WorkerPool, bypass_cache: bool) -> None:
        """
        Copy between addresses that are both mapped here; returns when done.
        """
    def copy_process_vm(self, pool: WorkerPool, pid: typing.SupportsInt | typing.SupportsIndex, remote_is_destination: bool) -> None:
        """
        Copy to or from another process by cross-memory attach; returns when done.
        """
    def post(self, copier: DeviceCopier, slot: typing.SupportsInt | typing.SupportsIndex, sequence: typing.SupportsInt | typing.SupportsIndex, num_sms: typing.SupportsInt | typing.SupportsIndex, engine: CopyEngine) -> CopyEngine:
        """
        Queue the copy on a GPU; see DeviceCopier.post.
        """
    @property
    def looks_up(self) -> bool:
        """
        Whether a GPU finds the addresses in its own memory.
        """
    @property
    def num_bytes(self) -> int:
        """
        Bytes that are copied.
        """
class UcxSettings:
    """
    How the ucx transport cuts and waits.
    """
    def __init__(self, *, staging: str = 'host', device: typing.SupportsInt | typing.SupportsIndex = -1, slot_bytes: typing.SupportsInt | typing.SupportsIndex = 2097152, num_slots: typing.SupportsInt | typing.SupportsIndex = 4, direct_bytes: typing.SupportsInt | typing.SupportsIndex = 262144, max_direct_bytes: typing.SupportsInt | typing.SupportsIndex = 8388608, num_direct: typing.SupportsInt | typing.SupportsIndex = 8, stall_s: typing.SupportsFloat | typing.SupportsIndex = 20.0, connect_s: typing.SupportsFloat | typing.SupportsIndex = 10.0) -> None:
        ...
    @property
    def connect_s(self) -> float:
        ...
    @property
    def direct_bytes(self) -> int:
        ...
    @property
    def num_slots(self) -> int:
        ...
    @property
    def num_sms(self) -> int:
        ...
    @property
    def slot_bytes(self) -> int:
        ...
    @property
    def stall_s(self) -> float:
        ...
class UcxMemory:
    """
    A range that UCX has registered, until the last owner is gone.
    """
    @property
    def address(self) -> int:
        ...
    @property
    def num_bytes(self) -> int:
        ...
class UcxContext:
    """
    One configuration of UCX and the memory registered in it.
    """
    def __init__(self, options: collections.abc.Sequence[tuple[str, str]], defaults: collections.abc.Sequence[tuple[str, str]]) -> None:
        ...
    def register_memory(self, address: typing.SupportsInt | typing.SupportsIndex, num_bytes: typing.SupportsInt | typing.SupportsIndex) -> UcxMemory:
        ...
class UcxServer:
    """
    Serves regions of this process to peers, in a thread of its own.
    """
    def __init__(self, *, context: UcxContext, host: str, secret: bytes, board_address: typing.SupportsInt | typing.SupportsIndex, num_slots: typing.SupportsInt | typing.SupportsIndex, withdrawn_slot: typing.SupportsInt | typing.SupportsIndex, num_threads: typing.SupportsInt | typing.SupportsIndex, settings: UcxSettings) -> None:
        ...
    def add_region(self, address: typing.SupportsInt | typing.SupportsIndex, num_bytes: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def close(self) -> bool:
        """
        Drop all peers; False where served memory must stay mapped for good.
        """
    @property
    def num_connections(self) -> int:
        ...
    @property
    def port(self) -> int:
        ...
class UcxLink:
    """
    The connecting side; one transfer at a time.
    """
    def __init__(self, *, context: UcxContext, host: str, port: typing.SupportsInt | typing.SupportsIndex, secret: bytes, slot: typing.SupportsInt | typing.SupportsIndex, name: str, num_threads: typing.SupportsInt | typing.SupportsIndex, settings: UcxSettings) -> None:
        ...
    def close(self) -> bool:
        """
        End the connection; False where pages must stay mapped for good.
        """
    def poll(self, timeout_s: typing.SupportsFloat | typing.SupportsIndex) -> bool:
        """
        Work for up to timeout_s; True once what was begun is complete.
        """
    def send_raw(self, message: typing.SupportsInt | typing.SupportsIndex, header: bytes, data: bytes) -> None:
        """
        Send any bytes as a message, for tests of what a server does with them.
        """
    def start_get(self, tables: PlanTables, sequence: typing.SupportsInt | typing.SupportsIndex, direct_bytes: typing.SupportsInt | typing.SupportsIndex, num_sms: typing.SupportsInt | typing.SupportsIndex = 0) -> None:
        """
        Begin a transfer from the server; poll until it is complete.
        """
    def start_put(self, tables: PlanTables, sequence: typing.SupportsInt | typing.SupportsIndex, direct_bytes: typing.SupportsInt | typing.SupportsIndex, num_sms: typing.SupportsInt | typing.SupportsIndex = 0) -> None:
        """
        Begin a transfer to the server; poll until it is complete.
        """
    @property
    def first_sequence(self) -> int:
        ...
    @property
    def transports(self) -> str:
        ...
def buffer_id(address: typing.SupportsInt | typing.SupportsIndex) -> int:
    ...
def build_info() -> BuildInfo:
    ...
def can_access_peer(from_device: typing.SupportsInt | typing.SupportsIndex, to_device: typing.SupportsInt | typing.SupportsIndex) -> bool:
    ...
def chase_pointers(device: typing.SupportsInt | typing.SupportsIndex, address: typing.SupportsInt | typing.SupportsIndex, num_slots: typing.SupportsInt | typing.SupportsIndex, stride_bytes: typing.SupportsInt | typing.SupportsIndex, num_hops: typing.SupportsInt | typing.SupportsIndex) -> ChaseResult:
    """
    Follow a ring of indices from slot 0 with one thread; returns when done.
    """
def device_count() -> int:
    ...
def device_info(device: typing.SupportsInt | typing.SupportsIndex) -> DeviceInfo:
    ...
def enable_peer_access(from_device: typing.SupportsInt | typing.SupportsIndex, to_device: typing.SupportsInt | typing.SupportsIndex) -> None:
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
def ucx_load(candidates: collections.abc.Sequence[str]) -> str:
    """
    Open the first libucp that fits, once a process; returns its version.
    """
