#include "copy/row_plan.hpp"

#include <algorithm>
#include <utility>

namespace kvxfer {

RowPlan::RowPlan(const SidePlan& side, const SidePlan::Box& box, const RowRange& rows,
                 std::uint64_t wire, bool gathers)
    : side_(side),
      box_(box),
      rows_(rows),
      wire_(wire),
      gathers_(gathers),
      shrink_(gathers && side.conversion != Conversion::kNone ? 2 : 1) {
  cut(0, {{0, 0, 0, 0}, {box.num_planes, box.num_segments, box.outer.count, box.inner.count}},
      rows.first_row, rows.first_row + rows.num_rows);
}

RowPlan RowPlan::gather(const SidePlan& side, const SidePlan::Box& box, const RowRange& rows,
                        std::uint64_t wire) {
  return {side, box, rows, wire, true};
}

RowPlan RowPlan::scatter(const SidePlan& side, const SidePlan::Box& box, const RowRange& rows,
                         std::uint64_t wire) {
  return {side, box, rows, wire, false};
}

/// Adds rows [begin, end) of what `at` holds from `axis` on: all of the axes below it, or else the
/// end of one index, whole indices, and the beginning of another.
void RowPlan::cut(std::uint32_t axis, Stretch at, std::uint64_t begin, std::uint64_t end) {
  if (begin == end) return;
  std::uint64_t unit = 1;  // rows of one index
  for (std::uint32_t below = axis + 1; below < kNumAxes; ++below) unit *= at.count[below];
  const auto cut_index = [&](std::uint64_t index, std::uint64_t from, std::uint64_t to) {
    Stretch one = at;
    one.first[axis] = index;
    one.count[axis] = 1;
    cut(axis + 1, one, from, to);
  };
  const std::uint64_t first = begin / unit;
  if (begin % unit != 0) {
    const std::uint64_t stop = std::min(end, (first + 1) * unit);
    cut_index(first, begin % unit, stop - first * unit);
    begin = stop;
  }
  const std::uint64_t last = end / unit;
  if (begin / unit < last) {
    Stretch whole = at;
    whole.first[axis] = begin / unit;
    whole.count[axis] = last - begin / unit;
    add(whole);
    begin = last * unit;
  }
  if (begin < end) cut_index(last, 0, end % unit);
}

void RowPlan::add(const Stretch& at) {
  const std::uint64_t run = rows_.num_bytes;
  const auto [plane, segment, outer, inner] = at.first;
  const auto [num_planes, num_segments, num_outer, num_inner] = at.count;
  CopyBox box{};
  box.first_plane = static_cast<std::uint32_t>(page_planes_.size());
  box.num_planes = static_cast<std::uint32_t>(num_planes);
  box.first_segment = static_cast<std::uint32_t>(segments_.size());
  box.num_segments = static_cast<std::uint32_t>(num_segments);
  box.outer = {static_cast<std::uint32_t>(num_outer), box_.outer.scale_step, box_.outer.stride,
               run * num_inner};
  box.inner = {static_cast<std::uint32_t>(num_inner), box_.inner.scale_step, box_.inner.stride,
               run};
  box.src_block_stride = box_.block_stride;
  box.src_slot_stride = box_.slot_stride;
  box.dst_block_stride = run * num_inner * num_outer;
  box.run_bytes = run * shrink_;
  box.scale_plane_step = box_.scale_plane_step;
  box.first_scale =
      static_cast<std::uint32_t>(box_.first_scale + plane * box_.scale_plane_step +
                                 outer * box_.outer.scale_step + inner * box_.inner.scale_step);
  if (!gathers_) {
    std::swap(box.src_block_stride, box.dst_block_stride);
    std::swap(box.src_slot_stride, box.dst_slot_stride);
    std::swap(box.outer.src_stride, box.outer.dst_stride);
    std::swap(box.inner.src_stride, box.inner.dst_stride);
  }
  boxes_.push_back(box);
  add_tables(at, run * num_inner * num_outer);
}

void RowPlan::add_tables(const Stretch& at, std::uint64_t page_bytes) {
  const auto [plane, segment, outer, inner] = at.first;
  const std::uint64_t shift =
      outer * box_.outer.stride + inner * box_.inner.stride + rows_.first_byte * shrink_;
  for (std::uint64_t index = 0; index < at.count[0]; ++index) {
    page_planes_.push_back(side_.planes[box_.first_plane + plane + index] + shift);
    wire_planes_.push_back(wire_);
    wire_ += page_bytes * at.count[1];
  }
  for (std::uint32_t index = 0; index < at.count[1]; ++index) {
    const SidePlan::Place& place = side_.segments[box_.first_segment + segment + index];
    segments_.push_back(gathers_ ? Segment{place.block, index, place.slot, 0}
                                 : Segment{index, place.block, 0, place.slot});
  }
}

CopyPlan RowPlan::plan() const {
  const auto& src = gathers_ ? page_planes_ : wire_planes_;
  const auto& dst = gathers_ ? wire_planes_ : page_planes_;
  const bool converts = shrink_ != 1;
  return {src.data(),
          dst.data(),
          segments_.data(),
          boxes_.data(),
          side_.inverse_scales.data(),
          static_cast<std::uint32_t>(src.size()),
          static_cast<std::uint32_t>(segments_.size()),
          static_cast<std::uint32_t>(boxes_.size()),
          converts ? static_cast<std::uint32_t>(side_.inverse_scales.size()) : 0,
          converts ? side_.conversion : Conversion::kNone};
}

}  // namespace kvxfer
