#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#define KVXFER_HOST_DEVICE __host__ __device__
#else
#define KVXFER_HOST_DEVICE
#endif

namespace kvxfer {

/// What to copy, in the one form that host threads and kernels both walk: `num_planes` base
/// addresses a side and `num_blocks` byte offsets a side. Page `index` is block `index %
/// num_blocks` of plane `index / num_blocks`. The size grows with planes + blocks, never with their
/// product; every offset is 64-bit. A view: it owns nothing.
struct CopyPlan {
  const std::uint64_t* src_planes;
  const std::uint64_t* dst_planes;
  const std::uint64_t* src_offsets;
  const std::uint64_t* dst_offsets;
  std::uint32_t num_planes;
  std::uint32_t num_blocks;
  std::uint64_t page_bytes;

  struct PagePair {
    std::uint64_t src;
    std::uint64_t dst;
  };

  KVXFER_HOST_DEVICE std::uint64_t num_pages() const {
    return static_cast<std::uint64_t>(num_planes) * num_blocks;
  }

  KVXFER_HOST_DEVICE PagePair page(std::uint64_t index) const {
    const std::uint64_t plane = index / num_blocks;
    const std::uint64_t block = index - plane * num_blocks;
    return {src_planes[plane] + src_offsets[block], dst_planes[plane] + dst_offsets[block]};
  }
};

static_assert(std::is_trivially_copyable_v<CopyPlan>, "kernels take the plan by value");

}  // namespace kvxfer
