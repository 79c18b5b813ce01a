// The paged copy by bulk-asynchronous (TMA) copies through shared memory. A warp has a ring of
// slots; its lanes each own one piece of a group, so runs of a few hundred bytes still fill a slot,
// and pieces that lie one behind the other are moved by one instruction.
//
// Completion: wait_group, not wait_group.read, which only frees the slot; then a fence between the
// asynchronous and the generic proxy; then completion.cuh.

#include <cuda_runtime.h>

#include <cstdint>

#include "copy/completion.cuh"
#include "copy/convert.cuh"
#include "copy/device_walk.cuh"
#include "copy/paged_copy.cuh"
#include "core/cuda_check.hpp"

namespace kvxfer {

namespace {

constexpr int kBarrierBytes = 8;
constexpr int kSlotAlignment = 128;

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

__device__ __forceinline__ void bulk_load(std::uint32_t slot, std::uint64_t src,
                                          std::uint32_t num_bytes, std::uint32_t barrier,
                                          std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(slot),
      "l"(src), "r"(num_bytes), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void bulk_store(std::uint64_t dst, std::uint32_t slot,
                                           std::uint32_t num_bytes, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(dst),
      "r"(slot), "r"(num_bytes), "l"(policy)
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
  std::uint64_t policy;
};

/// Neighbouring lanes whose pieces lie one behind the other, in memory as in the slot, are loaded
/// by the first of them: the bytes that this lane loads, 0 where another does or there are none.
/// Stores are left to all lanes: joined, 1 KiB runs at 8 SMs were a quarter slower.
__device__ __forceinline__ std::uint32_t join_neighbours(std::uint64_t address,
                                                         std::uint32_t num_bytes,
                                                         std::uint32_t full_bytes,
                                                         std::uint32_t lane) {
  constexpr std::uint32_t kAll = 0xffffffffu;
  const std::uint64_t end_before = __shfl_up_sync(kAll, address + num_bytes, 1);
  const bool full_before = __shfl_up_sync(kAll, num_bytes, 1) == full_bytes;
  const bool active = num_bytes != 0;
  const bool follows = lane != 0 && active && full_before && end_before == address;
  const std::uint32_t leaders = __ballot_sync(kAll, active && !follows);
  const std::uint32_t num_active = __popc(__ballot_sync(kAll, active));
  const std::uint32_t above = lane == kLanes - 1 ? 0 : leaders >> (lane + 1);
  const std::uint32_t end = above != 0 ? lane + __ffs(above) : num_active;
  const std::uint32_t last_bytes = __shfl_sync(kAll, num_bytes, (end - 1) & (kLanes - 1));
  return !active || follows ? 0 : (end - 1 - lane) * full_bytes + last_bytes;
}

/// Loads do not convert: what they read is the same either way.
__device__ __forceinline__ void start_load(const WarpRing& ring, std::uint32_t stage,
                                           GroupCursor& cursor, std::uint32_t group,
                                           std::uint32_t lane) {
  const Piece piece = cursor.piece<Conversion::kNone>(group, lane);
  const std::uint32_t piece_bytes = cursor.seek(group).piece_bytes;
  const std::uint32_t barrier = ring.barriers + stage * kBarrierBytes;
  const std::uint32_t group_bytes = __reduce_add_sync(0xffffffffu, piece.num_bytes);
  const std::uint32_t own_bytes = join_neighbours(piece.src, piece.num_bytes, piece_bytes, lane);
  if (lane == 0) barrier_expect(barrier, group_bytes);
  __syncwarp();
  if (own_bytes != 0) {
    bulk_load(ring.slots + stage * ring.slot_bytes + lane * piece_bytes, piece.src, own_bytes,
              barrier, ring.policy);
  }
}

/// Converts the slot in place: a piece that begins at byte b begins at b / 2 afterwards. The whole
/// slot passes through registers, so that no lane overwrites what another has yet to read.
template <Conversion kConversion>
__device__ __forceinline__ void convert_slot(std::uint32_t slot, const KernelBox& cut,
                                             const Piece& piece, std::uint32_t lane) {
  constexpr int kWords = kMaxConvertedSlotBytes / (kLanes * 16);
  const std::uint32_t used = cut.pieces_per_group * cut.piece_bytes;
  uint4 words[kWords];
#pragma unroll
  for (int step = 0; step < kWords; ++step) {
    const std::uint32_t at = (step * kLanes + lane) * 16;
    if (at >= used) continue;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[step].x), "=r"(words[step].y), "=r"(words[step].z),
                   "=r"(words[step].w)
                 : "r"(slot + at));
  }
  __syncwarp();
#pragma unroll
  for (int step = 0; step < kWords; ++step) {
    const std::uint32_t at = (step * kLanes + lane) * 16;
    const std::uint32_t owner = cut.piece.quotient(at);
    const float scale = __shfl_sync(0xffffffffu, piece.inverse_scale, owner & (kLanes - 1));
    if (at >= used) continue;
    const uint4& four = words[step];
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(slot + at / 2),
                 "r"(convert_four<kConversion>(four.x, four.y, scale)),
                 "r"(convert_four<kConversion>(four.z, four.w, scale))
                 : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before the bulk store reads it
  __syncwarp();
}

template <int kStoreDepth, Conversion kConversion>
__global__ void __launch_bounds__(512, 1)
    bulk_copy_kernel(const __grid_constant__ KernelArgs args, const BulkShape shape) {
  constexpr std::uint32_t kShrink = kConversion == Conversion::kNone ? 1 : 2;
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
                      evict_first_policy()};
  if (lane == 0) {
    for (std::uint32_t stage = 0; stage < num_stages; ++stage) {
      barrier_init(ring.barriers + stage * kBarrierBytes);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  __syncwarp();
  plant_delay(args);

  const std::uint32_t first = blockIdx.x + gridDim.x * warp;
  const std::uint32_t step = gridDim.x * num_warps;
  const std::uint32_t count =
      first < args.num_groups ? (args.num_groups - 1 - first) / step + 1 : 0;
  const std::uint32_t ahead = num_stages - kStoreDepth;
  GroupCursor loads(args);
  GroupCursor stores(args);

  for (std::uint32_t k = 0; k < ahead && k < count; ++k) {
    start_load(ring, k, loads, first + k * step, lane);
  }
  std::uint32_t stage = 0;
  std::uint32_t parity = 0;
  for (std::uint32_t k = 0; k < count; ++k) {
    const std::uint32_t group = first + k * step;
    const KernelBox& cut = stores.seek(group);
    const Piece piece = stores.piece<kConversion>(group, lane);
    const std::uint32_t slot = ring.slots + stage * slot_bytes;
    barrier_wait(ring.barriers + stage * kBarrierBytes, parity);
    if constexpr (kConversion != Conversion::kNone) {
      convert_slot<kConversion>(slot, cut, piece, lane);
    }
    if (piece.num_bytes != 0) {
      bulk_store(piece.dst, slot + lane * cut.piece_bytes / kShrink, piece.num_bytes / kShrink,
                 ring.policy);
    }
    bulk_commit();
    if (k + ahead < count) {
      // The slot to refill was last stored from kStoreDepth groups ago, each piece by its lane: all
      // wait for their own, and start_load() brings them together before any of them loads.
      bulk_wait_read<kStoreDepth>();
      start_load(ring, (stage + ahead) % num_stages, loads, first + (k + ahead) * step, lane);
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

template <int kStoreDepth, Conversion kConversion>
__global__ void bulk_copy_kernel(const __grid_constant__ KernelArgs, const BulkShape) {
  __trap();  // post() never chooses this kernel below sm_90
}

#endif

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

template <int kStoreDepth, Conversion kConversion>
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
  KVXFER_CUDA_CHECK(
      cudaLaunchKernelEx(&config, bulk_copy_kernel<kStoreDepth, kConversion>, args, launch.shape));
  KVXFER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void prepare_bulk_copy(int shared_bytes) {
  const auto allow = [shared_bytes](auto kernel) {
    KVXFER_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  };
  allow(bulk_copy_kernel<1, Conversion::kNone>);
  allow(bulk_copy_kernel<2, Conversion::kNone>);
  allow(bulk_copy_kernel<3, Conversion::kNone>);
  allow(bulk_copy_kernel<4, Conversion::kNone>);
  allow(bulk_copy_kernel<1, Conversion::kBf16ToE4m3>);
  allow(bulk_copy_kernel<1, Conversion::kF16ToE4m3>);
}

void launch_bulk_copy(const KernelArgs& args, const BulkLaunch& launch, void* stream) {
  const BulkShape& shape = launch.shape;
  const std::size_t num_slots = static_cast<std::size_t>(shape.num_warps) * shape.num_stages;
  const std::size_t barrier_bytes =
      (num_slots * kBarrierBytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
  const std::size_t shared_bytes = barrier_bytes + num_slots * shape.slot_bytes;
  auto* cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.conversion == Conversion::kBf16ToE4m3) {
    return launch_bulk<1, Conversion::kBf16ToE4m3>(args, launch, shared_bytes, cuda_stream);
  }
  if (args.conversion == Conversion::kF16ToE4m3) {
    return launch_bulk<1, Conversion::kF16ToE4m3>(args, launch, shared_bytes, cuda_stream);
  }
  switch (shape.store_depth) {
    case 1:
      return launch_bulk<1, Conversion::kNone>(args, launch, shared_bytes, cuda_stream);
    case 2:
      return launch_bulk<2, Conversion::kNone>(args, launch, shared_bytes, cuda_stream);
    case 3:
      return launch_bulk<3, Conversion::kNone>(args, launch, shared_bytes, cuda_stream);
    default:
      return launch_bulk<4, Conversion::kNone>(args, launch, shared_bytes, cuda_stream);
  }
}

}  // namespace kvxfer
