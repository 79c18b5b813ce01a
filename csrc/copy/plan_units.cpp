#include "copy/plan_units.hpp"

#include <utility>

namespace kvxfer {

namespace {

// A page is cut where a thread would have fewer than this many of them: the streaming copy takes
// four units side by side.
constexpr std::uint64_t kPagesPerThread = 4;
// Into so many parts of a thread's work that one more or less does not unbalance the team.
constexpr std::uint64_t kPartsPerThread = 16;
constexpr std::uint64_t kMinPartBytes = 1024;
constexpr std::uint64_t kLine = 64;

std::uint64_t divide_up(std::uint64_t value, std::uint64_t divisor) {
  return (value + divisor - 1) / divisor;
}

/// `total` in equal parts of at most about `limit`, which are multiples of `step`.
std::uint64_t equal_parts(std::uint64_t total, std::uint64_t limit, std::uint64_t step) {
  const std::uint64_t even = divide_up(total, divide_up(total, limit));
  return std::min(divide_up(even, step) * step, total);
}

std::uint64_t stride(const RowAxis& axis, OrderSide side) {
  return side == OrderSide::kSource ? axis.src_stride : axis.dst_stride;
}

/// The same box with its rows in the order of one side's addresses.
CopyBox with_rows_in_order(CopyBox box, OrderSide side) {
  const bool crossed = stride(box.outer, side) < stride(box.inner, side);
  if (crossed && box.outer.count > 1 && box.inner.count > 1) std::swap(box.outer, box.inner);
  return box;
}

}  // namespace

PlanUnits::PlanUnits(const CopyPlan& plan, OrderSide side, int num_threads,
                     std::uint64_t max_run_bytes)
    : plan_(plan) {
  const std::uint64_t thread_bytes =
      divide_up(plan.total_bytes() * plan.shrink(), static_cast<std::uint64_t>(num_threads));
  const Cut cut{divide_up(thread_bytes, kPagesPerThread),
                std::max(divide_up(thread_bytes, kPartsPerThread), kMinPartBytes), max_run_bytes};
  for (std::uint32_t index = 0; index < plan.num_boxes; ++index) {
    if (plan.boxes[index].num_pages() != 0) add_box(plan.boxes[index], side, cut);
  }
}

void PlanUnits::add_box(const CopyBox& box, OrderSide side, const Cut& cut) {
  Share share{};
  share.box = with_rows_in_order(box, side);
  share.order = order_of(box, side);
  share.part_bytes = box.run_bytes;
  share.rows_per_group = box.num_rows();
  std::uint64_t max_run_bytes = cut.max_run_bytes;
  if (box.num_rows() * box.run_bytes > cut.above_bytes) {
    max_run_bytes = std::min(max_run_bytes, cut.part_bytes);
    share.rows_per_group =
        equal_parts(box.num_rows(), std::max<std::uint64_t>(cut.part_bytes / box.run_bytes, 1), 1);
  }
  if (box.run_bytes > max_run_bytes) {
    share.part_bytes = equal_parts(box.run_bytes, max_run_bytes, kLine);
    share.rows_per_group = 1;
  }
  share.parts_per_row = divide_up(box.run_bytes, share.part_bytes);
  share.groups_per_page = divide_up(box.num_rows(), share.rows_per_group);
  share.first_work = total_work_;
  share.unit_work = share.part_bytes * share.rows_per_group;
  total_work_ += share.unit_work * share.num_units();
  shares_.push_back(share);
}

const std::uint32_t* PlanUnits::order_of(const CopyBox& box, OrderSide side) {
  const bool known = !orders_.empty() && orders_.back().first_segment == box.first_segment &&
                     orders_.back().segments.size() == box.num_segments;
  if (known) return orders_.back().segments.data();
  // By block and slot: the order of the addresses whatever the strides of a box are.
  std::vector<std::pair<std::uint64_t, std::uint32_t>> keys(box.num_segments);
  for (std::uint32_t index = 0; index < box.num_segments; ++index) {
    const Segment& at = plan_.segments[box.first_segment + index];
    const bool by_source = side == OrderSide::kSource;
    const std::uint64_t block = by_source ? at.src_block : at.dst_block;
    keys[index] = {block << 32 | (by_source ? at.src_slot : at.dst_slot), index};
  }
  std::sort(keys.begin(), keys.end());
  Order order{box.first_segment, {}};
  order.segments.reserve(keys.size());
  for (const auto& [key, index] : keys) order.segments.push_back(index);
  orders_.push_back(std::move(order));
  return orders_.back().segments.data();
}

}  // namespace kvxfer
