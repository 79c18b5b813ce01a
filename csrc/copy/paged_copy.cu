// The paged copy as kernels. Every address is computed on the device from the plan's tables; a
// warp's lanes each own one piece of a group, so pages of a few hundred bytes still fill a slot.
//
// Completion, in order: each issuing thread waits until its bulk stores are complete at the
// destination (wait_group, not wait_group.read, which only frees the slot), fences between the
// asynchronous and the generic proxy, then at system scope; the block joins; its first thread
// counts the block in; the last block alone stores the sequence number, with release order at
// system scope, into host memory that both processes map. One block's flag would say nothing of the
// others.

#include <cuda_runtime.h>

#include <string>

#include "copy/paged_copy.cuh"
#include "core/cuda_check.hpp"

namespace kvxfer {

namespace {

constexpr int kLanes = 32;
constexpr int kLoadStoreThreads = 1024;
constexpr int kBarrierBytes = 8;
constexpr int kSlotAlignment = 128;

__device__ __forceinline__ CopyPlan plan_of(const KernelArgs& args) {
  const std::uint64_t* tables = args.tables != nullptr ? args.tables : args.inline_tables;
  const std::uint64_t* offsets = tables + 2 * static_cast<std::uint64_t>(args.num_planes);
  return {tables,          tables + args.num_planes, offsets,        offsets + args.num_blocks,
          args.num_planes, args.num_blocks,          args.page_bytes};
}

struct Piece {
  std::uint64_t src;
  std::uint64_t dst;
  std::uint32_t num_bytes;  // 0: this lane has none
};

__device__ __forceinline__ Piece piece_at(const KernelArgs& args, std::uint32_t index) {
  const CopyPlan plan = plan_of(args);
  const std::uint32_t page = index / args.pieces_per_page;
  const std::uint32_t chunk = index - page * args.pieces_per_page;
  const std::uint32_t plane = page / args.num_blocks;
  const std::uint32_t block = page - plane * args.num_blocks;
  const std::uint64_t begin = static_cast<std::uint64_t>(chunk) * args.piece_bytes;
  const std::uint64_t left = args.page_bytes - begin;
  return {plan.src_planes[plane] + plan.src_offsets[block] + begin,
          plan.dst_planes[plane] + plan.dst_offsets[block] + begin,
          left < args.piece_bytes ? static_cast<std::uint32_t>(left) : args.piece_bytes};
}

__device__ void sleep_milliseconds(int milliseconds) {
  for (int step = 0; step < 2 * milliseconds; ++step) __nanosleep(500000);
}

__device__ __forceinline__ void plant_delay(const KernelArgs& args) {
  if (args.fault != CopyFault::kNone && blockIdx.x == 0) sleep_milliseconds(20);
}

__device__ __forceinline__ void store_flag(const KernelArgs& args) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(args.flag), "l"(args.sequence)
               : "memory");
}

/// Called by all threads of a block once their own stores are complete.
__device__ __forceinline__ void signal_when_last(const KernelArgs& args) {
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();
  const std::uint32_t arrived = atomicAdd(args.arrivals, 1u) + 1;
  const bool last = arrived == gridDim.x;
  if (last) *args.arrivals = 0;  // the next kernel of the stream counts from zero
  if (last || args.fault == CopyFault::kSignalEarly) {
    __threadfence_system();
    store_flag(args);
  }
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(std::uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(std::uint32_t barrier, std::uint32_t num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(num_bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// Pages pass through once: without this hint they would push a running model's tiles out of L2.
__device__ __forceinline__ std::uint64_t evict_first_policy() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void bulk_load(std::uint32_t slot, const Piece& piece,
                                          std::uint32_t barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(slot),
      "l"(piece.src), "r"(piece.num_bytes), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void bulk_store(const Piece& piece, std::uint32_t slot,
                                           std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
          piece.dst),
      "r"(slot), "r"(piece.num_bytes), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Waits until at most kPending of this thread's groups still read their slots.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void bulk_wait_complete() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}

/// One warp's ring of slots, and its share of the groups: group first, first + step, ...
struct WarpRing {
  std::uint32_t barriers;
  std::uint32_t slots;
  std::uint32_t slot_bytes;
  std::uint32_t lane_offset;
  std::uint64_t policy;
};

__device__ __forceinline__ Piece lane_piece(const KernelArgs& args, std::uint32_t group,
                                            std::uint32_t lane) {
  const std::uint32_t index = group * args.pieces_per_group + lane;
  if (lane >= args.pieces_per_group || index >= args.num_pieces) return {0, 0, 0};
  return piece_at(args, index);
}

__device__ __forceinline__ void start_load(const WarpRing& ring, std::uint32_t stage,
                                           const Piece& piece, std::uint32_t lane) {
  const std::uint32_t barrier = ring.barriers + stage * kBarrierBytes;
  const std::uint32_t group_bytes = __reduce_add_sync(0xffffffffu, piece.num_bytes);
  if (lane == 0) barrier_expect(barrier, group_bytes);
  __syncwarp();
  if (piece.num_bytes != 0) {
    bulk_load(ring.slots + stage * ring.slot_bytes + ring.lane_offset, piece, barrier, ring.policy);
  }
}

template <int kStoreDepth>
__global__ void __launch_bounds__(512, 1)
    bulk_copy_kernel(const __grid_constant__ KernelArgs args, const BulkShape shape) {
  extern __shared__ __align__(kSlotAlignment) unsigned char shared[];
  const std::uint32_t warp = threadIdx.x / kLanes;
  const std::uint32_t lane = threadIdx.x % kLanes;
  const std::uint32_t num_warps = blockDim.x / kLanes;
  const auto num_stages = static_cast<std::uint32_t>(shape.num_stages);
  const auto slot_bytes = static_cast<std::uint32_t>(shape.slot_bytes);
  const std::uint32_t all_barriers = (num_warps * num_stages * kBarrierBytes + kSlotAlignment - 1) /
                                     kSlotAlignment * kSlotAlignment;
  const std::uint32_t base = shared_address(shared);
  const WarpRing ring{base + warp * num_stages * kBarrierBytes,
                      base + all_barriers + warp * num_stages * slot_bytes, slot_bytes,
                      lane * args.piece_bytes, evict_first_policy()};
  if (lane == 0) {
    for (std::uint32_t stage = 0; stage < num_stages; ++stage) {
      barrier_init(ring.barriers + stage * kBarrierBytes);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  __syncwarp();
  plant_delay(args);

  const std::uint32_t num_groups =
      (args.num_pieces + args.pieces_per_group - 1) / args.pieces_per_group;
  const std::uint32_t first = blockIdx.x + gridDim.x * warp;
  const std::uint32_t step = gridDim.x * num_warps;
  const std::uint32_t count = first < num_groups ? (num_groups - 1 - first) / step + 1 : 0;
  const std::uint32_t ahead = num_stages - kStoreDepth;

  for (std::uint32_t k = 0; k < ahead && k < count; ++k) {
    start_load(ring, k, lane_piece(args, first + k * step, lane), lane);
  }
  std::uint32_t stage = 0;
  std::uint32_t parity = 0;
  for (std::uint32_t k = 0; k < count; ++k) {
    const Piece piece = lane_piece(args, first + k * step, lane);
    barrier_wait(ring.barriers + stage * kBarrierBytes, parity);
    if (piece.num_bytes != 0) {
      bulk_store(piece, ring.slots + stage * slot_bytes + ring.lane_offset, ring.policy);
    }
    bulk_commit();
    if (k + ahead < count) {
      // The slot to refill was last stored from kStoreDepth groups ago, by this same lane.
      const Piece next = lane_piece(args, first + (k + ahead) * step, lane);
      const std::uint32_t refill = (stage + ahead) % num_stages;
      bulk_wait_read<kStoreDepth>();
      start_load(ring, refill, next, lane);
    }
    if (++stage == num_stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  bulk_wait_complete();
  signal_when_last(args);
}

#else

template <int kStoreDepth>
__global__ void bulk_copy_kernel(const __grid_constant__ KernelArgs, const BulkShape) {
  __trap();  // post() never chooses this kernel below sm_90
}

#endif

template <typename Word>
__device__ __forceinline__ void copy_words(const Piece& piece, std::uint32_t lane) {
  constexpr int kUnroll = 8;
  const auto* src = reinterpret_cast<const Word*>(piece.src);
  auto* dst = reinterpret_cast<Word*>(piece.dst);
  const std::uint32_t num_words = piece.num_bytes / sizeof(Word);
  std::uint32_t at = lane;
  for (; at + (kUnroll - 1) * kLanes < num_words; at += kUnroll * kLanes) {
    Word words[kUnroll];
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) words[step] = src[at + step * kLanes];
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) dst[at + step * kLanes] = words[step];
  }
  for (; at < num_words; at += kLanes) dst[at] = src[at];
}

template <typename Word>
__global__ void __launch_bounds__(kLoadStoreThreads, 1)
    load_store_copy_kernel(const __grid_constant__ KernelArgs args) {
  const std::uint32_t warp = threadIdx.x / kLanes;
  const std::uint32_t lane = threadIdx.x % kLanes;
  const std::uint32_t step = gridDim.x * (blockDim.x / kLanes);
  plant_delay(args);
  for (std::uint64_t index = blockIdx.x + gridDim.x * warp; index < args.num_pieces;
       index += step) {
    copy_words<Word>(piece_at(args, static_cast<std::uint32_t>(index)), lane);
  }
  signal_when_last(args);
}

__global__ void signal_kernel(const __grid_constant__ KernelArgs args) {
  __threadfence_system();
  store_flag(args);
}

// Blocks of a cluster share one part of the GPU (a GPC). A few SMs taken together leave the other
// parts whole for a model's kernels, which come in clusters themselves; taken here and there they
// break one up everywhere.
constexpr int kMaxClusterBlocks = 8;
constexpr int kMaxClusteredGrid = 32;

unsigned cluster_blocks(int num_blocks) {
  if (num_blocks > kMaxClusteredGrid) return 1;
  int size = kMaxClusterBlocks;
  while (num_blocks % size != 0) size /= 2;
  return static_cast<unsigned>(size);
}

template <int kStoreDepth>
void launch_bulk(const KernelArgs& args, const BulkLaunch& launch, std::size_t shared_bytes,
                 cudaStream_t stream) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {cluster_blocks(launch.num_blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(launch.num_blocks);
  config.blockDim = static_cast<unsigned>(launch.shape.num_warps * kLanes);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  KVXFER_CUDA_CHECK(cudaLaunchKernelEx(&config, bulk_copy_kernel<kStoreDepth>, args, launch.shape));
  KVXFER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void prepare_bulk_copy(int shared_bytes) {
  for (const auto kernel :
       {bulk_copy_kernel<1>, bulk_copy_kernel<2>, bulk_copy_kernel<3>, bulk_copy_kernel<4>}) {
    KVXFER_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  }
}

void launch_bulk_copy(const KernelArgs& args, const BulkLaunch& launch, void* stream) {
  const BulkShape& shape = launch.shape;
  const std::size_t num_slots = static_cast<std::size_t>(shape.num_warps) * shape.num_stages;
  const std::size_t barrier_bytes =
      (num_slots * kBarrierBytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
  const std::size_t shared_bytes = barrier_bytes + num_slots * shape.slot_bytes;
  auto* cuda_stream = static_cast<cudaStream_t>(stream);
  switch (shape.store_depth) {
    case 1:
      return launch_bulk<1>(args, launch, shared_bytes, cuda_stream);
    case 2:
      return launch_bulk<2>(args, launch, shared_bytes, cuda_stream);
    case 3:
      return launch_bulk<3>(args, launch, shared_bytes, cuda_stream);
    default:
      return launch_bulk<4>(args, launch, shared_bytes, cuda_stream);
  }
}

void launch_load_store_copy(const KernelArgs& args, int num_blocks, void* stream) {
  auto* cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.word_bytes == 16) {
    load_store_copy_kernel<uint4><<<num_blocks, kLoadStoreThreads, 0, cuda_stream>>>(args);
  } else if (args.word_bytes >= 4) {
    load_store_copy_kernel<std::uint32_t><<<num_blocks, kLoadStoreThreads, 0, cuda_stream>>>(args);
  } else {
    load_store_copy_kernel<std::uint8_t><<<num_blocks, kLoadStoreThreads, 0, cuda_stream>>>(args);
  }
  KVXFER_CUDA_CHECK(cudaGetLastError());
}

void launch_signal(const KernelArgs& args, void* stream) {
  signal_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(args);
  KVXFER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace kvxfer
