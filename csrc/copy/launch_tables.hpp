#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy/copy_plan.hpp"
#include "copy/kernel_box.hpp"

namespace kvxfer {

/// How a plan is cut for a kernel.
struct PieceLimits {
  std::uint32_t piece_bytes;  ///< longest piece, in bytes of the source
  std::uint32_t group_bytes;  ///< a group holds as many pieces as fit; 0: one
};

/// A plan in the form that one launch takes: all tables one behind the other, in 8-byte words:
/// source planes, destination planes, segments, boxes, scales.
class LaunchTables {
 public:
  /// Throws Error(kInvalidUsage) where the plan has 2^31 pieces or more.
  LaunchTables(const CopyPlan& plan, const PieceLimits& limits);

  [[nodiscard]] std::size_t num_words() const { return num_words_; }
  [[nodiscard]] std::uint32_t num_groups() const { return num_groups_; }
  [[nodiscard]] std::uint32_t num_boxes() const {
    return static_cast<std::uint32_t>(boxes_.size());
  }
  /// Writes num_words() words to `out`.
  void write(std::uint64_t* out) const;

 private:
  const CopyPlan& plan_;
  std::vector<KernelBox> boxes_;
  std::uint32_t num_groups_ = 0;
  std::size_t num_words_ = 0;
};

/// A power of two that divides every address and length of the plan on its side: 16 at most at the
/// destination, and as many source bytes as give that at the source; 0 where a converted element
/// lies at an odd address.
std::uint32_t common_word_bytes(const CopyPlan& plan);

/// A stretch of segments that lie one behind the other on both sides of a box without rows.
struct SegmentRun {
  std::uint32_t first;
  std::uint32_t count;
};

/// The runs of `box` in one plane; empty where it has rows, or more runs than `limit`: counting on
/// would cost more than a copy engine could save.
std::vector<SegmentRun> merge_segments(const CopyPlan& plan, const CopyBox& box,
                                       std::uint64_t limit);

}  // namespace kvxfer
