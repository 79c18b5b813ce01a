#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <string>
#include <utility>

#include "bindings/bindings.hpp"
#include "copy/copy_plan.hpp"
#include "copy/pattern.hpp"
#include "core/check.hpp"

namespace kvxfer::bindings {

using Table = py::array_t<std::uint64_t, py::array::c_style>;

// Leaves room for rounding up without a wrap of 64 bits.
constexpr std::uint64_t kMaxPageBytes = 1ull << 62;

inline std::uint32_t table_length(const Table& first, const Table& second, const char* what) {
  KVXFER_REQUIRE(first.ndim() == 1 && second.ndim() == 1 && first.size() == second.size(),
                 std::string("the two tables of ") + what + " have " +
                     std::to_string(first.size()) + " and " + std::to_string(second.size()) +
                     " entries; give two rows of one length");
  KVXFER_REQUIRE(first.size() <= (1 << 30), std::string("too many ") + what);
  return static_cast<std::uint32_t>(first.size());
}

/// Four uint64 arrays kept alive, and the view of them that copies take.
class PlanTables {
 public:
  PlanTables(Table src_planes, Table dst_planes, Table src_offsets, Table dst_offsets,
             std::uint64_t page_bytes)
      : src_planes_(std::move(src_planes)),
        dst_planes_(std::move(dst_planes)),
        src_offsets_(std::move(src_offsets)),
        dst_offsets_(std::move(dst_offsets)) {
    KVXFER_REQUIRE(page_bytes > 0 && page_bytes <= kMaxPageBytes,
                   "page_bytes is " + std::to_string(page_bytes) + "; use 1 to 2^62");
    plan_ = {src_planes_.data(),
             dst_planes_.data(),
             src_offsets_.data(),
             dst_offsets_.data(),
             table_length(src_planes_, dst_planes_, "planes"),
             table_length(src_offsets_, dst_offsets_, "blocks"),
             page_bytes};
  }
  [[nodiscard]] const CopyPlan& plan() const { return plan_; }

 private:
  Table src_planes_, dst_planes_, src_offsets_, dst_offsets_;
  CopyPlan plan_{};
};

/// The same for pattern pages.
class PatternTables {
 public:
  PatternTables(Table planes, Table plane_keys, Table offsets, Table block_keys,
                std::uint64_t page_bytes)
      : planes_(std::move(planes)),
        plane_keys_(std::move(plane_keys)),
        offsets_(std::move(offsets)),
        block_keys_(std::move(block_keys)) {
    KVXFER_REQUIRE(
        page_bytes > 0 && page_bytes % 8 == 0,
        "a pattern page of " + std::to_string(page_bytes) + " bytes; use a multiple of 8");
    pages_ = {planes_.data(),
              plane_keys_.data(),
              offsets_.data(),
              block_keys_.data(),
              table_length(planes_, plane_keys_, "planes"),
              table_length(offsets_, block_keys_, "blocks"),
              page_bytes};
  }
  [[nodiscard]] const PatternPages& pages() const { return pages_; }

 private:
  Table planes_, plane_keys_, offsets_, block_keys_;
  PatternPages pages_{};
};

}  // namespace kvxfer::bindings
