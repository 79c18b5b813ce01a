#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "copy/copy_plan.hpp"

namespace kvxfer {

/// Which side's addresses the pages of a plan are walked in the order of.
enum class OrderSide { kSource, kDestination };

/// One run of bytes, and which scale its elements take.
struct CopyRun {
  std::uint64_t src;
  std::uint64_t dst;
  std::uint64_t scale;

  /// Moves on by `count` rows of an axis.
  void advance(const RowAxis& axis, std::uint64_t count) {
    src += count * axis.src_stride;
    dst += count * axis.dst_stride;
    scale += count * axis.scale_step;
  }
};

/// A share of one page: some of its rows, or a part of one row.
struct CopyUnit {
  const CopyBox* box;
  CopyRun first;
  std::uint32_t first_inner;  // where the first run lies on the inner axis
  std::uint64_t num_rows;
  std::uint64_t run_bytes;  // of each row, at the source
};

/// Calls visit(CopyRun) for each row of a unit.
template <class Visit>
inline void for_each_run(const CopyUnit& unit, Visit&& visit) {
  const RowAxis outer = unit.box->outer;
  const RowAxis inner = unit.box->inner;
  CopyRun row = unit.first;
  std::uint64_t num_left = unit.num_rows;
  std::uint64_t num_skipped = unit.first_inner;
  while (true) {
    const std::uint64_t count = std::min(num_left, inner.count - num_skipped);
    CopyRun run = row;
    for (std::uint64_t index = 0; index < count; ++index) {
      visit(run);
      run.advance(inner, 1);
    }
    num_left -= count;
    if (num_left == 0) return;
    row.advance(inner, 0 - num_skipped);
    row.advance(outer, 1);
    num_skipped = 0;
  }
}

/// A plan cut into units that threads share. Work is measured in bytes: a thread takes a stretch of
/// [0, total_work()), and with it the units that begin there, so boxes of any sizes balance.
///
/// Pages go in the order of one side's addresses. Any order is right; this one lets the prefetcher
/// run on where neighbours in memory are both wanted, and lets their descriptors merge.
class PlanUnits {
 public:
  /// No run is longer than `max_run_bytes` (a multiple of 64). The plan's tables must outlive this.
  PlanUnits(const CopyPlan& plan, OrderSide side, int num_threads, std::uint64_t max_run_bytes);

  [[nodiscard]] std::uint64_t total_work() const { return total_work_; }

  /// Calls visit(const CopyUnit&) for each unit that begins in this stretch of the work.
  template <class Visit>
  void for_each_unit(std::uint64_t begin, std::uint64_t end, Visit&& visit) const {
    for (const Share& share : shares_) {
      std::uint64_t left = share.unit_at(end) - share.unit_at(begin);
      if (left == 0) continue;
      for (Cursor at = share.cursor(share.unit_at(begin)); left > 0; --left) {
        visit(unit(share, at));
        share.advance(at);
      }
    }
  }

 private:
  /// Pages of more bytes than `above_bytes` are cut into parts of about `part_bytes`, and no run
  /// may be longer than `max_run_bytes`.
  struct Cut {
    std::uint64_t above_bytes;
    std::uint64_t part_bytes;
    std::uint64_t max_run_bytes;
  };

  /// A place in a box: the part of a row, the group of rows, the segment and the plane.
  struct Cursor {
    std::uint64_t part;
    std::uint64_t group;
    std::uint32_t position;  // of the segment in the order of walking
    std::uint32_t plane;
  };

  /// A box and how its pages are cut: into groups of rows, or each row into parts.
  struct Share {
    CopyBox box;
    const std::uint32_t* order;  // of its segments
    std::uint64_t part_bytes;
    std::uint64_t parts_per_row;
    std::uint64_t rows_per_group;
    std::uint64_t groups_per_page;
    std::uint64_t first_work;
    std::uint64_t unit_work;

    [[nodiscard]] std::uint64_t num_units() const {
      return box.num_pages() * groups_per_page * parts_per_row;
    }
    /// The first unit that begins at `work` or later.
    [[nodiscard]] std::uint64_t unit_at(std::uint64_t work) const {
      if (work <= first_work) return 0;
      return std::min((work - first_work + unit_work - 1) / unit_work, num_units());
    }
    [[nodiscard]] Cursor cursor(std::uint64_t unit) const {
      const std::uint64_t group = unit / parts_per_row;
      const std::uint64_t page = group / groups_per_page;
      return {unit % parts_per_row, group % groups_per_page,
              static_cast<std::uint32_t>(page % box.num_segments),
              static_cast<std::uint32_t>(page / box.num_segments)};
    }
    void advance(Cursor& at) const {
      if (++at.part < parts_per_row) return;
      at.part = 0;
      if (++at.group < groups_per_page) return;
      at.group = 0;
      if (++at.position < box.num_segments) return;
      at.position = 0;
      ++at.plane;
    }
  };

  [[nodiscard]] CopyUnit unit(const Share& share, const Cursor& at) const {
    const CopyBox& box = share.box;
    const CopyPlan::PagePair page = plan_.page(box, at.plane, share.order[at.position]);
    const std::uint64_t first_byte = at.part * share.part_bytes;
    const std::uint64_t first_row = at.group * share.rows_per_group;
    const std::uint64_t outer = first_row == 0 ? 0 : first_row / box.inner.count;
    const std::uint64_t inner = first_row - outer * box.inner.count;
    CopyRun first{page.src + first_byte, page.dst + first_byte / plan_.shrink(),
                  box.first_scale + std::uint64_t{at.plane} * box.scale_plane_step};
    first.advance(box.outer, outer);
    first.advance(box.inner, inner);
    return {&box, first, static_cast<std::uint32_t>(inner),
            std::min(share.rows_per_group, box.num_rows() - first_row),
            std::min(share.part_bytes, box.run_bytes - first_byte)};
  }
  void add_box(const CopyBox& box, OrderSide side, const Cut& cut);
  const std::uint32_t* order_of(const CopyBox& box, OrderSide side);

  /// The segments of a box, counted within it, in the order of walking.
  struct Order {
    std::uint32_t first_segment;
    std::vector<std::uint32_t> segments;
  };

  CopyPlan plan_;
  std::vector<Order> orders_;
  std::vector<Share> shares_;
  std::uint64_t total_work_ = 0;
};

}  // namespace kvxfer
