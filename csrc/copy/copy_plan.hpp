#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#define KVXFER_HOST_DEVICE __host__ __device__
#else
#define KVXFER_HOST_DEVICE
#endif

namespace kvxfer {

/// Tokens that lie together on both sides: they start at slot `src_slot` of block `src_block` there
/// and at slot `dst_slot` of block `dst_block` here. How many they are is a matter of the box.
struct Segment {
  std::uint32_t src_block;
  std::uint32_t dst_block;
  std::uint32_t src_slot;
  std::uint32_t dst_slot;
};

/// One axis of the rows inside a page: `count` rows, so many bytes apart on either side. The scale
/// of a converted row moves on by `scale_step` entries a row.
struct RowAxis {
  std::uint32_t count;
  std::uint32_t scale_step;
  std::uint64_t src_stride;
  std::uint64_t dst_stride;
};

/// A strided box: for each of its planes and each of its segments, `outer.count * inner.count` runs
/// of `run_bytes` contiguous bytes (counted at the source; half of that at the destination where
/// the plan converts to fp8).
struct CopyBox {
  std::uint32_t first_plane;
  std::uint32_t num_planes;
  std::uint32_t first_segment;
  std::uint32_t num_segments;
  std::uint64_t src_block_stride;
  std::uint64_t dst_block_stride;
  std::uint64_t src_slot_stride;
  std::uint64_t dst_slot_stride;
  RowAxis outer;
  RowAxis inner;
  std::uint64_t run_bytes;
  std::uint32_t first_scale;
  std::uint32_t scale_plane_step;

  KVXFER_HOST_DEVICE std::uint64_t num_pages() const {
    return static_cast<std::uint64_t>(num_planes) * num_segments;
  }
  KVXFER_HOST_DEVICE std::uint64_t num_rows() const {
    return static_cast<std::uint64_t>(outer.count) * inner.count;
  }
  KVXFER_HOST_DEVICE std::uint64_t num_bytes() const {
    return num_pages() * num_rows() * run_bytes;
  }
};

/// What becomes of the elements on the way.
enum class Conversion : std::uint32_t { kNone, kBf16ToE4m3, kF16ToE4m3 };

/// What to copy, in the one form that host threads and kernels both walk: base addresses of the
/// planes, segments of tokens, and boxes that combine them. The size grows with planes + segments,
/// never with their product; every offset is 64-bit. A view: it owns nothing.
struct CopyPlan {
  const std::uint64_t* src_planes;
  const std::uint64_t* dst_planes;
  const Segment* segments;
  const CopyBox* boxes;
  const float* inverse_scales;  // what a converted element is multiplied by
  std::uint32_t num_planes;
  std::uint32_t num_segments;
  std::uint32_t num_boxes;
  std::uint32_t num_scales;
  Conversion conversion;

  struct PagePair {
    std::uint64_t src;
    std::uint64_t dst;
  };

  /// Where row (0, 0) of a page of a box begins; both indices count within the box.
  KVXFER_HOST_DEVICE PagePair page(const CopyBox& box, std::uint32_t plane,
                                   std::uint32_t segment) const {
    const Segment& at = segments[box.first_segment + segment];
    return {src_planes[box.first_plane + plane] + at.src_block * box.src_block_stride +
                at.src_slot * box.src_slot_stride,
            dst_planes[box.first_plane + plane] + at.dst_block * box.dst_block_stride +
                at.dst_slot * box.dst_slot_stride};
  }
  /// How many bytes at the source give one at the destination.
  KVXFER_HOST_DEVICE std::uint64_t shrink() const {
    return conversion == Conversion::kNone ? 1 : 2;
  }

  /// Bytes written at the destination.
  KVXFER_HOST_DEVICE std::uint64_t total_bytes() const {
    std::uint64_t sum = 0;
    for (std::uint32_t index = 0; index < num_boxes; ++index) sum += boxes[index].num_bytes();
    return sum / shrink();
  }
};

static_assert(std::is_trivially_copyable_v<CopyPlan> && std::is_trivially_copyable_v<CopyBox>,
              "kernels take them by value");

}  // namespace kvxfer
