#include "copy/list_copy.hpp"

#include <algorithm>
#include <bit>
#include <numeric>
#include <string>

#include "core/check.hpp"

namespace kvxfer {

namespace {

constexpr std::size_t kColumns = 3;  // address, bytes, device
constexpr std::uint64_t kWordBytes = 16;
// Each length is a box, and kernels look through the boxes one after the other.
constexpr std::size_t kMaxBoxes = 256;
// Shorter lists ride in the kernel's parameters (kInlineWords), which no table on a GPU can beat.
constexpr std::size_t kMinLookedUp = 160;
// The plan's one plane begins at address 0, on either side.
constexpr std::uint64_t kZero = 0;

std::string name_of(std::uint64_t value) { return std::to_string(value); }

}  // namespace

DescriptorList::DescriptorList(std::span<const std::uint64_t> rows,
                               std::span<const ListRange> ranges) {
  const std::size_t count = rows.size() / kColumns;
  KVXFER_REQUIRE(count > 0 && count < kMaxDescriptors && rows.size() % kColumns == 0,
                 name_of(count) + " descriptors; use 1 to 2^31 - 1, of three numbers each");
  addresses_.reserve(count);
  std::vector<bool> used(ranges.size(), false);
  const ListRange* range = nullptr;  // of the descriptor before
  common_bytes_ = rows[1];
  for (std::size_t index = 0; index < count; ++index) {
    const std::uint64_t address = rows[index * kColumns];
    const std::uint64_t num_bytes = rows[index * kColumns + 1];
    const auto holds = [&](const ListRange& one) {
      return one.begin <= address && address < one.end && num_bytes <= one.end - address;
    };
    if (range == nullptr || !holds(*range)) {
      const auto after =
          std::upper_bound(ranges.begin(), ranges.end(), address,
                           [](std::uint64_t at, const ListRange& one) { return at < one.begin; });
      KVXFER_REQUIRE(after != ranges.begin() && holds(*(after - 1)),
                     "descriptor " + name_of(index) + ", " + name_of(num_bytes) + " bytes at " +
                         name_of(address) + ", lies in no registered range");
      range = &*(after - 1);
      used[static_cast<std::size_t>(range - ranges.data())] = true;
    }
    KVXFER_REQUIRE(num_bytes != 0, "descriptor " + name_of(index) + " has no bytes");
    if (num_bytes != common_bytes_) common_bytes_ = 0;
    addresses_.push_back(address + range->shift);
    bits_ |= addresses_.back() | num_bytes;
  }
  if (common_bytes_ == 0) {
    lengths_.reserve(count);
    for (std::size_t index = 0; index < count; ++index) {
      lengths_.push_back(rows[index * kColumns + 1]);
    }
  }
  for (std::size_t index = 0; index < used.size(); ++index) {
    if (used[index]) ranges_used_.push_back(static_cast<std::uint32_t>(index));
  }
}

void DescriptorList::place_on(int device) {
  const std::size_t num_bytes = addresses_.size() * sizeof(std::uint64_t);
  auto placed = std::make_unique<DeviceBuffer>(device, num_bytes);
  placed->fill_from(addresses_.data());
  on_device_ = std::move(placed);
}

ListPlan::ListPlan(const Side& src, const Side& dst) {
  check(src, dst);
  const std::uint64_t bits = kWordBytes | src.list.bits() | dst.list.bits();
  unit_bits_ = static_cast<std::uint32_t>(std::countr_zero(bits));
  unit_bytes_ = 1u << unit_bits_;
  const std::size_t count = src.indices.size();
  segments_.reserve(count);
  const bool one_length = src.list.common_bytes() != 0 && dst.list.common_bytes() != 0;
  const bool on_device = src.list.device_addresses() != 0 && dst.list.device_addresses() != 0;
  if (one_length && on_device && count >= kMinLookedUp) {
    add_numbers(src, dst);
    add_box(0, count, src.list.common_bytes());
    return;
  }
  std::vector<std::uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  const auto bytes_of = [&](std::uint32_t at) {
    return src.list.num_bytes(static_cast<std::size_t>(src.indices[at]));
  };
  if (!one_length) {
    std::stable_sort(order.begin(), order.end(), [&](std::uint32_t one, std::uint32_t other) {
      return bytes_of(one) < bytes_of(other);
    });
  }
  add_places(src, dst, order);
  for (std::size_t first = 0; first < count;) {
    const std::uint64_t num_bytes = bytes_of(order[first]);
    std::size_t end = one_length ? count : first + 1;
    while (end < count && bytes_of(order[end]) == num_bytes) ++end;
    KVXFER_REQUIRE(boxes_.size() < kMaxBoxes, "descriptors of more than " + name_of(kMaxBoxes) +
                                                  " different lengths in a transfer; split it");
    add_box(first, end - first, num_bytes);
    first = end;
  }
}

void ListPlan::check(const Side& src, const Side& dst) const {
  const std::size_t count = src.indices.size();
  KVXFER_REQUIRE(count > 0 && count == dst.indices.size(),
                 name_of(count) + " and " + name_of(dst.indices.size()) +
                     " indices; give as many on both sides, and one at least");
  const auto require_within = [](const Side& side) {
    const std::size_t limit = side.list.size();
    std::uint64_t largest = 0;
    for (const std::int64_t index : side.indices) {
      largest = std::max(largest, static_cast<std::uint64_t>(index));
    }
    // A negative index is a large one.
    KVXFER_REQUIRE(largest < limit, "index " + std::to_string(static_cast<std::int64_t>(largest)) +
                                        " into a list of " + name_of(limit) + " descriptors");
  };
  require_within(src);
  require_within(dst);
  const std::uint64_t src_bytes = src.list.common_bytes();
  if (src_bytes != 0 && src_bytes == dst.list.common_bytes()) return;
  for (std::size_t at = 0; at < count; ++at) {
    const std::uint64_t from = src.list.num_bytes(static_cast<std::size_t>(src.indices[at]));
    const std::uint64_t to = dst.list.num_bytes(static_cast<std::size_t>(dst.indices[at]));
    KVXFER_REQUIRE(from == to, "pair " + name_of(at) + " has " + name_of(from) + " bytes and " +
                                   name_of(to) + "; a descriptor goes to one of its own length");
  }
}

Segment ListPlan::place(std::uint64_t src, std::uint64_t dst) const {
  src >>= unit_bits_;
  dst >>= unit_bits_;
  return {static_cast<std::uint32_t>(src >> 32), static_cast<std::uint32_t>(dst >> 32),
          static_cast<std::uint32_t>(src), static_cast<std::uint32_t>(dst)};
}

void ListPlan::add_numbers(const Side& src, const Side& dst) {
  for (std::size_t at = 0; at < src.indices.size(); ++at) {
    segments_.push_back({static_cast<std::uint32_t>(src.indices[at]),
                         static_cast<std::uint32_t>(dst.indices[at]), 0, 0});
  }
  lookup_ = {src.list.device_addresses(), dst.list.device_addresses(), unit_bytes_};
}

void ListPlan::add_places(const Side& src, const Side& dst, std::span<const std::uint32_t> order) {
  for (const std::uint32_t at : order) {
    segments_.push_back(place(src.list.address(static_cast<std::size_t>(src.indices[at])),
                              dst.list.address(static_cast<std::size_t>(dst.indices[at]))));
  }
}

void ListPlan::add_box(std::size_t first, std::size_t count, std::uint64_t num_bytes) {
  CopyBox box{};
  box.num_planes = 1;
  box.first_segment = static_cast<std::uint32_t>(first);
  box.num_segments = static_cast<std::uint32_t>(count);
  box.src_slot_stride = box.dst_slot_stride = unit_bytes_;
  box.src_block_stride = box.dst_block_stride = std::uint64_t{unit_bytes_} << 32;
  box.outer.count = box.inner.count = 1;
  box.run_bytes = num_bytes;
  boxes_.push_back(box);
}

CopyPlan ListPlan::plan() const {
  return {&kZero,
          &kZero,
          segments_.data(),
          boxes_.data(),
          nullptr,
          1,
          static_cast<std::uint32_t>(segments_.size()),
          static_cast<std::uint32_t>(boxes_.size()),
          0,
          Conversion::kNone};
}

}  // namespace kvxfer
