#pragma once

#include <cstdint>
#include <vector>

#include "copy/side_plan.hpp"

namespace kvxfer {

/// Rows of a box, or a part of one.
struct RowRange {
  std::uint64_t first_row;
  std::uint64_t num_rows;
  std::uint64_t first_byte;  // within the row, of the bytes on their way; 0 for several rows
  std::uint64_t num_bytes;   // of every row, of the bytes on their way
};

/// A stretch of one side's rows as a plan between pages and a buffer in which they lie one behind
/// another: what SidePlan::gather and scatter do, in the form that a GPU takes. A stretch need not
/// begin or end with a plane, so it is cut into boxes, at most seven. Owns its tables, but for the
/// scales, which are the side's.
class RowPlan {
 public:
  /// From pages to `wire`, with the conversion. Needs a side that is valid and a range inside it.
  static RowPlan gather(const SidePlan& side, const SidePlan::Box& box, const RowRange& rows,
                        std::uint64_t wire);
  /// From `wire` to pages.
  static RowPlan scatter(const SidePlan& side, const SidePlan::Box& box, const RowRange& rows,
                         std::uint64_t wire);

  /// A view: as long as this and the side live.
  [[nodiscard]] CopyPlan plan() const;

 private:
  static constexpr std::uint32_t kNumAxes = 4;  // plane, segment, outer, inner
  struct Stretch {
    std::uint64_t first[kNumAxes];
    std::uint64_t count[kNumAxes];
  };

  RowPlan(const SidePlan& side, const SidePlan::Box& box, const RowRange& rows, std::uint64_t wire,
          bool gathers);
  void cut(std::uint32_t axis, Stretch at, std::uint64_t begin, std::uint64_t end);
  void add(const Stretch& at);
  void add_tables(const Stretch& at, std::uint64_t page_bytes);

  const SidePlan& side_;
  const SidePlan::Box& box_;
  RowRange rows_;
  std::uint64_t wire_;  // where the next row goes
  bool gathers_;
  std::uint64_t shrink_;
  std::vector<std::uint64_t> page_planes_;
  std::vector<std::uint64_t> wire_planes_;
  std::vector<Segment> segments_;
  std::vector<CopyBox> boxes_;
};

}  // namespace kvxfer
