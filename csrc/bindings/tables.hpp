#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.hpp"
#include "copy/copy_plan.hpp"
#include "copy/pattern.hpp"

namespace kvxfer::bindings {

/// An array of exactly this dtype, C-contiguous: bind arguments with py::arg().noconvert(), so that
/// no copy is made unseen.
template <class T>
using Table = py::array_t<T, py::array::c_style>;

/// The arrays of a copy plan kept alive, its boxes checked against them, and the view that copies
/// take.
class PlanTables {
 public:
  /// `segments` is [S, 4], the members of Segment; `boxes` is [B, 19], see kBoxColumns in
  /// tables.cpp. Throws Error(kInvalidUsage) where a box leaves the tables or counts do not fit.
  PlanTables(Table<std::uint64_t> src_planes, Table<std::uint64_t> dst_planes,
             Table<std::uint32_t> segments, const Table<std::uint64_t>& boxes,
             Table<float> inverse_scales, const std::string& conversion);
  PlanTables(const PlanTables&) = delete;
  PlanTables& operator=(const PlanTables&) = delete;

  [[nodiscard]] const CopyPlan& plan() const { return plan_; }

 private:
  Table<std::uint64_t> src_planes_, dst_planes_;
  Table<std::uint32_t> segments_;
  Table<float> inverse_scales_;
  std::vector<CopyBox> boxes_;
  CopyPlan plan_{};
};

/// The same for vectors that carry the test pattern.
class PatternTables {
 public:
  PatternTables(Table<std::uint64_t> planes, Table<std::uint64_t> plane_keys,
                Table<std::uint64_t> offsets, Table<std::uint64_t> token_keys,
                Table<std::uint32_t> token_counts, std::uint64_t token_stride,
                std::uint64_t head_stride, std::uint32_t num_heads, std::uint32_t first_head,
                std::uint64_t vector_bytes, const std::string& conversion,
                const std::optional<Table<float>>& inverse_scales);
  PatternTables(const PatternTables&) = delete;
  PatternTables& operator=(const PatternTables&) = delete;

  [[nodiscard]] const PatternPages& pages() const { return pages_; }

 private:
  Table<std::uint64_t> planes_, plane_keys_, offsets_, token_keys_;
  Table<std::uint32_t> token_counts_;
  Table<float> inverse_scales_;
  PatternPages pages_{};
};

}  // namespace kvxfer::bindings
