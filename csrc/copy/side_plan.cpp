#include "copy/side_plan.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "copy/fp8.hpp"
#include "core/check.hpp"

namespace kvxfer {

namespace {

using Wide = unsigned __int128;
constexpr Wide kLimit = Wide{1} << 62;
// Below this much a member's share of the work is not worth waking it for.
constexpr std::uint64_t kBytesPerMember = 512 << 10;

std::byte* pointer(std::uint64_t address) { return reinterpret_cast<std::byte*>(address); }

/// Runs job(begin, end) over [0, num_rows), by the pool where there is enough to do.
void share_rows(WorkerPool& pool, std::uint64_t num_rows, std::uint64_t run_bytes,
                const WorkerPool::Job& job) {
  if (num_rows * run_bytes < 2 * kBytesPerMember) {
    job(0, num_rows);
  } else {
    pool.run(num_rows, job);
  }
}

void require_range(std::uint64_t first, std::uint64_t count, std::size_t limit, const char* what) {
  KVXFER_REQUIRE(first + count <= limit, std::string(what) + " " + std::to_string(first) + " to " +
                                             std::to_string(first + count) + " of a table of " +
                                             std::to_string(limit));
}

/// The members of a plan's tables that belong to one of its sides.
struct SideMembers {
  const std::uint64_t* CopyPlan::* planes;
  std::uint32_t Segment::* block;
  std::uint32_t Segment::* slot;
  std::uint64_t CopyBox::* block_stride;
  std::uint64_t CopyBox::* slot_stride;
  std::uint64_t RowAxis::* stride;
};

constexpr SideMembers kSource{&CopyPlan::src_planes,     &Segment::src_block,
                              &Segment::src_slot,        &CopyBox::src_block_stride,
                              &CopyBox::src_slot_stride, &RowAxis::src_stride};
constexpr SideMembers kDestination{&CopyPlan::dst_planes,     &Segment::dst_block,
                                   &Segment::dst_slot,        &CopyBox::dst_block_stride,
                                   &CopyBox::dst_slot_stride, &RowAxis::dst_stride};

/// One side as a source has it, but for what only a source needs: scales and the conversion.
SidePlan side_of(const CopyPlan& plan, const SideMembers& members) {
  SidePlan side;
  const std::uint64_t* planes = plan.*members.planes;
  side.planes.assign(planes, planes + plan.num_planes);
  side.segments.reserve(plan.num_segments);
  for (std::uint32_t at = 0; at < plan.num_segments; ++at) {
    const Segment& segment = plan.segments[at];
    side.segments.push_back({segment.*members.block, segment.*members.slot});
  }
  for (std::uint32_t at = 0; at < plan.num_boxes; ++at) {
    const CopyBox& box = plan.boxes[at];
    side.boxes.push_back({box.first_plane,
                          box.num_planes,
                          box.first_segment,
                          box.num_segments,
                          box.*members.block_stride,
                          box.*members.slot_stride,
                          {box.outer.count, box.outer.scale_step, box.outer.*members.stride},
                          {box.inner.count, box.inner.scale_step, box.inner.*members.stride},
                          box.run_bytes,
                          box.first_scale,
                          box.scale_plane_step});
  }
  return side;
}

}  // namespace

SidePlan SidePlan::source(const CopyPlan& plan) {
  SidePlan side = side_of(plan, kSource);
  side.inverse_scales.assign(plan.inverse_scales, plan.inverse_scales + plan.num_scales);
  side.conversion = plan.conversion;
  return side;
}

SidePlan SidePlan::destination(const CopyPlan& plan) {
  SidePlan side = side_of(plan, kDestination);
  for (Box& box : side.boxes) {
    box.run_bytes /= plan.shrink();
    box.outer.scale_step = box.inner.scale_step = 0;
    box.first_scale = box.scale_plane_step = 0;
  }
  return side;
}

std::uint64_t SidePlan::wire_bytes() const {
  std::uint64_t sum = 0;
  for (const Box& box : boxes) sum += box.num_rows() * wire_run_bytes(box);
  return sum;
}

SidePlan::Run SidePlan::run(const Box& box, std::uint64_t row) const {
  const std::uint64_t page = row / box.rows_per_page();
  const std::uint64_t in_page = row % box.rows_per_page();
  const std::uint64_t outer = in_page / box.inner.count;
  const std::uint64_t inner = in_page % box.inner.count;
  const std::uint64_t plane = page / box.num_segments;
  const Place& at = segments[box.first_segment + page % box.num_segments];
  return {planes[box.first_plane + plane] + at.block * box.block_stride +
              at.slot * box.slot_stride + outer * box.outer.stride + inner * box.inner.stride,
          box.first_scale + plane * box.scale_plane_step + outer * box.outer.scale_step +
              inner * box.inner.scale_step};
}

/// Divides once a page and steps from there.
template <class Visit>
void SidePlan::for_each_run(const Box& box, std::uint64_t first_row, std::uint64_t num_rows,
                            Visit&& visit) const {
  const std::uint64_t end = first_row + num_rows;
  std::uint64_t row = first_row;
  while (row < end) {
    const std::uint64_t in_page = row % box.rows_per_page();
    const std::uint64_t page_end = std::min(end, row - in_page + box.rows_per_page());
    std::uint64_t inner = in_page % box.inner.count;
    Run line = run(box, row - inner);
    while (row < page_end) {
      const std::uint64_t count = std::min<std::uint64_t>(box.inner.count - inner, page_end - row);
      Run at{line.address + inner * box.inner.stride, line.scale + inner * box.inner.scale_step};
      for (std::uint64_t step = 0; step < count; ++step) {
        visit(at);
        at.address += box.inner.stride;
        at.scale += box.inner.scale_step;
      }
      row += count;
      inner = 0;
      line.address += box.outer.stride;
      line.scale += box.outer.scale_step;
    }
  }
}

void SidePlan::gather(WorkerPool& pool, const Box& box, std::uint64_t first_row,
                      std::uint64_t num_rows, std::byte* wire) const {
  const std::uint64_t wire_run = wire_run_bytes(box);
  share_rows(pool, num_rows, wire_run, [&](std::uint64_t begin, std::uint64_t end) {
    std::byte* to = wire + begin * wire_run;
    for_each_run(box, first_row + begin, end - begin, [&](const Run& at) {
      if (conversion == Conversion::kNone) {
        std::memcpy(to, pointer(at.address), wire_run);
      } else {
        convert_run(conversion, to, pointer(at.address), wire_run, inverse_scales[at.scale]);
      }
      to += wire_run;
    });
  });
}

void SidePlan::gather_part(const Box& box, std::uint64_t row, std::uint64_t first_byte,
                           std::uint64_t num_bytes, std::byte* wire) const {
  const Run at = run(box, row);
  if (conversion == Conversion::kNone) {
    std::memcpy(wire, pointer(at.address + first_byte), num_bytes);
  } else {
    convert_run(conversion, wire, pointer(at.address + 2 * first_byte), num_bytes,
                inverse_scales[at.scale]);
  }
}

void SidePlan::scatter(WorkerPool& pool, const Box& box, std::uint64_t first_row,
                       std::uint64_t num_rows, const std::byte* wire) const {
  share_rows(pool, num_rows, box.run_bytes, [&](std::uint64_t begin, std::uint64_t end) {
    const std::byte* from = wire + begin * box.run_bytes;
    for_each_run(box, first_row + begin, end - begin, [&](const Run& at) {
      std::memcpy(pointer(at.address), from, box.run_bytes);
      from += box.run_bytes;
    });
  });
}

void SidePlan::require_tables(const Box& box) const {
  require_range(box.first_plane, box.num_planes, planes.size(), "planes");
  require_range(box.first_segment, box.num_segments, segments.size(), "segments");
  KVXFER_REQUIRE(box.outer.count > 0 && box.inner.count > 0, "a box without rows");
  KVXFER_REQUIRE(box.run_bytes > 0 && box.run_bytes <= kLimit, "runs of no bytes, or too many");
  if (conversion == Conversion::kNone || box.num_rows() == 0) return;
  KVXFER_REQUIRE(box.run_bytes % 2 == 0, "a conversion of half an element");
  const Wide last = Wide{box.first_scale} + Wide{box.num_planes - 1} * box.scale_plane_step +
                    Wide{box.outer.count - 1} * box.outer.scale_step +
                    Wide{box.inner.count - 1} * box.inner.scale_step;
  KVXFER_REQUIRE(last < inverse_scales.size(),
                 "a scale outside the table of " + std::to_string(inverse_scales.size()));
}

std::uint64_t SidePlan::highest_place(const Box& box) const {
  Wide highest = 0;
  for (std::uint32_t index = 0; index < box.num_segments; ++index) {
    const Place& at = segments[box.first_segment + index];
    highest =
        std::max(highest, Wide{at.block} * box.block_stride + Wide{at.slot} * box.slot_stride);
  }
  highest += Wide{box.outer.count - 1} * box.outer.stride;
  highest += Wide{box.inner.count - 1} * box.inner.stride;
  highest += box.run_bytes;
  KVXFER_REQUIRE(highest <= kLimit, "a box of more than 2^62 bytes");
  return static_cast<std::uint64_t>(highest);
}

void SidePlan::require_valid(const std::vector<Region>& regions) const {
  Wide total = 0;
  for (const Box& box : boxes) {
    require_tables(box);
    const Wide pages = Wide{box.num_planes} * box.num_segments;
    KVXFER_REQUIRE(pages * box.rows_per_page() <= kLimit, "more than 2^62 rows");
    if (pages == 0) continue;
    total += std::min(pages * box.rows_per_page() * box.run_bytes, kLimit + 1);
    KVXFER_REQUIRE(total <= kLimit, "more than 2^62 bytes");
    // Places and strides are not negative: the lowest byte is the plane's own or above it.
    const std::uint64_t extent = highest_place(box);
    for (std::uint32_t plane = box.first_plane; plane < box.first_plane + box.num_planes; ++plane) {
      const std::uint64_t begin = planes[plane];
      const bool inside = std::any_of(regions.begin(), regions.end(), [&](const Region& region) {
        return begin >= region.address && extent <= region.num_bytes &&
               begin - region.address <= region.num_bytes - extent;
      });
      KVXFER_REQUIRE(inside, "bytes " + std::to_string(begin) + " to " + std::to_string(begin) +
                                 " + " + std::to_string(extent) +
                                 " do not lie in an exported region");
    }
  }
}

}  // namespace kvxfer
