#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy/copy_plan.hpp"
#include "core/worker_pool.hpp"

namespace kvxfer {

/// A range of memory that copies may touch.
struct Region {
  std::uint64_t address;
  std::uint64_t num_bytes;
};

/// One side of a copy plan, which owns its tables: what a process needs that has only this side in
/// its memory. The rows of a box are counted in one order on both sides (plane, segment, outer,
/// inner), so that a row number and a run of bytes is all that travels with data.
class SidePlan {
 public:
  struct Place {
    std::uint32_t block;
    std::uint32_t slot;
  };
  struct Axis {
    std::uint32_t count;
    std::uint32_t scale_step;
    std::uint64_t stride;
  };
  struct Box {
    std::uint32_t first_plane;
    std::uint32_t num_planes;
    std::uint32_t first_segment;
    std::uint32_t num_segments;
    std::uint64_t block_stride;
    std::uint64_t slot_stride;
    Axis outer;
    Axis inner;
    std::uint64_t run_bytes;  // on this side
    std::uint32_t first_scale;
    std::uint32_t scale_plane_step;

    [[nodiscard]] std::uint64_t rows_per_page() const {
      return std::uint64_t{outer.count} * inner.count;
    }
    [[nodiscard]] std::uint64_t num_rows() const {
      return std::uint64_t{num_planes} * num_segments * rows_per_page();
    }
  };
  struct Run {
    std::uint64_t address;
    std::uint64_t scale;
  };

  std::vector<std::uint64_t> planes;
  std::vector<Place> segments;
  std::vector<Box> boxes;
  std::vector<float> inverse_scales;
  Conversion conversion = Conversion::kNone;  // on the way out of this side

  /// What is read, with the conversion.
  static SidePlan source(const CopyPlan& plan);
  /// What is written, in the bytes that arrive.
  static SidePlan destination(const CopyPlan& plan);

  /// Bytes of a row of `box` on their way: after the conversion.
  [[nodiscard]] std::uint64_t wire_run_bytes(const Box& box) const {
    return conversion == Conversion::kNone ? box.run_bytes : box.run_bytes / 2;
  }
  /// Bytes of all boxes on their way.
  [[nodiscard]] std::uint64_t wire_bytes() const;
  [[nodiscard]] Run run(const Box& box, std::uint64_t row) const;

  /// Throws Error(kInvalidUsage) unless every index is inside the tables, counts and bytes are
  /// countable in 62 bits, and every byte of every box lies inside one of `regions`. Costs planes +
  /// segments a box, not their product.
  void require_valid(const std::vector<Region>& regions) const;

  /// Copies (and converts) rows [first_row, first_row + num_rows) of a box one behind the other to
  /// `wire`. Needs a plan that is valid.
  void gather(WorkerPool& pool, const Box& box, std::uint64_t first_row, std::uint64_t num_rows,
              std::byte* wire) const;
  /// The same for `num_bytes` of one row's bytes on their way, from `first_byte` on.
  void gather_part(const Box& box, std::uint64_t row, std::uint64_t first_byte,
                   std::uint64_t num_bytes, std::byte* wire) const;
  /// The other way, without a conversion.
  void scatter(WorkerPool& pool, const Box& box, std::uint64_t first_row, std::uint64_t num_rows,
               const std::byte* wire) const;

 private:
  void require_tables(const Box& box) const;
  [[nodiscard]] std::uint64_t highest_place(const Box& box) const;

  template <class Visit>
  void for_each_run(const Box& box, std::uint64_t first_row, std::uint64_t num_rows,
                    Visit&& visit) const;
};

}  // namespace kvxfer
