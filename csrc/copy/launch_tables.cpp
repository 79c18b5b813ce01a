#include "copy/launch_tables.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/check.hpp"

namespace kvxfer {

namespace {

constexpr std::uint64_t kMaxPieces = 1ull << 31;
constexpr std::uint32_t kMaxLanes = 32;
constexpr std::uint32_t kWordBytes = 16;

std::uint64_t pieces_of(const CopyBox& box, std::uint32_t piece_bytes) {
  const std::uint64_t per_run = (box.run_bytes + piece_bytes - 1) / piece_bytes;
  return box.num_pages() * box.num_rows() * per_run;
}

KernelBox cut(const CopyBox& box, const PieceLimits& limits, std::uint32_t first_group) {
  KernelBox cut{};
  cut.box = box;
  cut.first_group = first_group;
  cut.piece_bytes =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(box.run_bytes, limits.piece_bytes));
  const std::uint64_t num_pieces = pieces_of(box, cut.piece_bytes);
  KVXFER_REQUIRE(first_group + num_pieces < kMaxPieces,
                 "a plan of at least " + std::to_string(first_group + num_pieces) +
                     " pieces passes 2^31; split the transfer");
  cut.num_pieces = static_cast<std::uint32_t>(num_pieces);
  cut.pieces_per_group =
      std::clamp<std::uint32_t>(limits.group_bytes / cut.piece_bytes, 1, kMaxLanes);
  cut.pieces_per_run = Divider::of(
      static_cast<std::uint32_t>((box.run_bytes + cut.piece_bytes - 1) / cut.piece_bytes));
  cut.rows = Divider::of(static_cast<std::uint32_t>(box.num_rows()));
  cut.inner_rows = Divider::of(box.inner.count);
  cut.segments = Divider::of(box.num_segments);
  cut.piece = Divider::of(cut.piece_bytes);
  return cut;
}

template <typename Item>
std::uint64_t* append(std::uint64_t* out, const Item* items, std::size_t count) {
  if (count != 0) std::memcpy(out, items, count * sizeof(Item));
  return out + (count * sizeof(Item) + 7) / 8;
}

}  // namespace

LaunchTables::LaunchTables(const CopyPlan& plan, const PieceLimits& limits) : plan_(plan) {
  boxes_.reserve(plan.num_boxes);
  for (std::uint32_t index = 0; index < plan.num_boxes; ++index) {
    const CopyBox& box = plan.boxes[index];
    if (box.num_bytes() == 0) continue;
    const KernelBox& added = boxes_.emplace_back(cut(box, limits, num_groups_));
    num_groups_ += (added.num_pieces + added.pieces_per_group - 1) / added.pieces_per_group;
  }
  num_words_ = 2ull * plan.num_planes + 2ull * plan.num_segments +
               boxes_.size() * (sizeof(KernelBox) / 8) + (plan.num_scales + 1ull) / 2;
}

void LaunchTables::write(std::uint64_t* out) const {
  out = append(out, plan_.src_planes, plan_.num_planes);
  out = append(out, plan_.dst_planes, plan_.num_planes);
  out = append(out, plan_.segments, plan_.num_segments);
  out = append(out, boxes_.data(), boxes_.size());
  append(out, plan_.inverse_scales, plan_.num_scales);
}

std::uint32_t common_word_bytes(const CopyPlan& plan) {
  const std::uint64_t shrink = plan.shrink();
  std::uint64_t src_bits = kWordBytes * shrink;
  std::uint64_t dst_bits = kWordBytes;
  for (std::uint32_t index = 0; index < plan.num_boxes; ++index) {
    const CopyBox& box = plan.boxes[index];
    src_bits |= box.src_block_stride | box.src_slot_stride | box.outer.src_stride |
                box.inner.src_stride | box.run_bytes;
    dst_bits |= box.dst_block_stride | box.dst_slot_stride | box.outer.dst_stride |
                box.inner.dst_stride | box.run_bytes / shrink;
  }
  for (std::uint32_t plane = 0; plane < plan.num_planes; ++plane) {
    src_bits |= plan.src_planes[plane];
    dst_bits |= plan.dst_planes[plane];
  }
  // What divides a set of numbers to a power of two is the lowest bit of any of them.
  const auto lowest = [](std::uint64_t bits) { return bits & (~bits + 1); };
  return static_cast<std::uint32_t>(std::min(lowest(src_bits) / shrink, lowest(dst_bits)));
}

std::vector<SegmentRun> merge_segments(const CopyPlan& plan, const CopyBox& box,
                                       std::uint64_t limit) {
  if (box.num_rows() != 1 || plan.conversion != Conversion::kNone) return {};
  std::vector<SegmentRun> runs;
  CopyPlan::PagePair expected{};
  for (std::uint32_t index = 0; index < box.num_segments; ++index) {
    const auto page = plan.page(box, 0, index);
    if (index > 0 && page.src == expected.src && page.dst == expected.dst) {
      ++runs.back().count;
    } else {
      if (runs.size() == limit) return {};
      runs.push_back({index, 1});
    }
    expected = {page.src + box.run_bytes, page.dst + box.run_bytes};
  }
  return runs;
}

}  // namespace kvxfer
