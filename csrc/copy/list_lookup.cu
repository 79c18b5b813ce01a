// Puts places in the stead of the numbers of descriptors, in the tables of a launch: one thread a
// segment, before the copy kernel on the same stream. The lists lie in this GPU's memory, so that a
// transfer brings 16 bytes a descriptor and no gather on the host.

#include <cuda_runtime.h>

#include <cstdint>

#include "copy/paged_copy.cuh"
#include "core/cuda_check.hpp"

namespace kvxfer {

namespace {

constexpr unsigned kThreads = 256;

__global__ void look_up_kernel(Segment* segments, std::uint32_t num_segments,
                               const std::uint64_t* src_addresses,
                               const std::uint64_t* dst_addresses, int unit_bits) {
  const std::uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= num_segments) return;
  const Segment numbers = segments[index];
  const std::uint64_t src = src_addresses[numbers.src_block] >> unit_bits;
  const std::uint64_t dst = dst_addresses[numbers.dst_block] >> unit_bits;
  segments[index] = {static_cast<std::uint32_t>(src >> 32), static_cast<std::uint32_t>(dst >> 32),
                     static_cast<std::uint32_t>(src), static_cast<std::uint32_t>(dst)};
}

}  // namespace

void launch_look_up(const SegmentLookup& lookup, std::uint64_t segments, std::uint32_t num_segments,
                    void* stream) {
  int unit_bits = 0;
  while ((1u << unit_bits) < lookup.unit_bytes) ++unit_bits;
  const unsigned num_blocks = (num_segments + kThreads - 1) / kThreads;
  look_up_kernel<<<num_blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      reinterpret_cast<Segment*>(segments), num_segments,
      reinterpret_cast<const std::uint64_t*>(lookup.src_addresses),
      reinterpret_cast<const std::uint64_t*>(lookup.dst_addresses), unit_bits);
  KVXFER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace kvxfer
