#pragma once

// How a kernel finds its work: every address is computed on the device from the plan's tables.

#include <cstdint>

#include "copy/kernel_box.hpp"
#include "copy/paged_copy.cuh"

namespace kvxfer {

constexpr int kLanes = 32;

/// The tables of one launch, as LaunchTables lays them out.
struct Tables {
  const std::uint64_t* src_planes;
  const std::uint64_t* dst_planes;
  const Segment* segments;
  const KernelBox* boxes;
  const float* inverse_scales;

  __device__ __forceinline__ explicit Tables(const KernelArgs& args) {
    const std::uint64_t* words = args.tables != nullptr ? args.tables : args.inline_tables;
    src_planes = words;
    dst_planes = words + args.num_planes;
    words += 2 * static_cast<std::uint64_t>(args.num_planes);
    segments = reinterpret_cast<const Segment*>(words);
    boxes = reinterpret_cast<const KernelBox*>(segments + args.num_segments);
    inverse_scales = reinterpret_cast<const float*>(boxes + args.num_boxes);
  }
};

struct Piece {
  std::uint64_t src;
  std::uint64_t dst;
  std::uint32_t num_bytes;  // at the source; 0: this lane has none
  float inverse_scale;
};

template <Conversion kConversion>
__device__ __forceinline__ Piece piece_at(const Tables& tables, const KernelBox& cut,
                                          std::uint32_t index) {
  constexpr std::uint32_t kShrink = kConversion == Conversion::kNone ? 1 : 2;
  const CopyBox& box = cut.box;
  const KernelBox::Place at = cut.place(index);
  const Segment segment = tables.segments[box.first_segment + at.segment];
  const std::uint32_t plane = box.first_plane + at.plane;
  const std::uint64_t begin = static_cast<std::uint64_t>(at.chunk) * cut.piece_bytes;
  const std::uint64_t left = box.run_bytes - begin;
  Piece piece;
  piece.src = tables.src_planes[plane] + segment.src_block * box.src_block_stride +
              segment.src_slot * box.src_slot_stride + at.outer * box.outer.src_stride +
              at.inner * box.inner.src_stride + begin;
  piece.dst = tables.dst_planes[plane] + segment.dst_block * box.dst_block_stride +
              segment.dst_slot * box.dst_slot_stride + at.outer * box.outer.dst_stride +
              at.inner * box.inner.dst_stride + begin / kShrink;
  piece.num_bytes = left < cut.piece_bytes ? static_cast<std::uint32_t>(left) : cut.piece_bytes;
  if constexpr (kConversion != Conversion::kNone) {
    piece.inverse_scale =
        tables.inverse_scales[box.first_scale + at.plane * box.scale_plane_step +
                              at.outer * box.outer.scale_step + at.inner * box.inner.scale_step];
  }
  return piece;
}

/// Walks groups upwards; boxes follow one another in the order of their groups.
class GroupCursor {
 public:
  __device__ __forceinline__ explicit GroupCursor(const KernelArgs& args)
      : tables_(args), num_boxes_(args.num_boxes) {}

  __device__ __forceinline__ const KernelBox& seek(std::uint32_t group) {
    while (box_ + 1 < num_boxes_ && group >= tables_.boxes[box_ + 1].first_group) ++box_;
    return tables_.boxes[box_];
  }

  template <Conversion kConversion>
  __device__ __forceinline__ Piece piece(std::uint32_t group, std::uint32_t lane) {
    const KernelBox& cut = seek(group);
    const std::uint32_t index = (group - cut.first_group) * cut.pieces_per_group + lane;
    if (lane >= cut.pieces_per_group || index >= cut.num_pieces) return {0, 0, 0, 0.0f};
    return piece_at<kConversion>(tables_, cut, index);
  }

 private:
  Tables tables_;
  std::uint32_t num_boxes_;
  std::uint32_t box_ = 0;
};

}  // namespace kvxfer
