#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "copy/copy_plan.hpp"
#include "copy/segment_lookup.hpp"
#include "memory/device.hpp"

namespace kvxfer {

/// A stretch of a peer's or of this process's memory, and what is added to an address in it so that
/// copies find it here.
struct ListRange {
  std::uint64_t begin;
  std::uint64_t end;
  std::uint64_t shift;  // modulo 2^64
};

/// One side's descriptors, (address, bytes) each, prepared once for many transfers. Every one lies
/// in a range, whose shift its address has taken.
class DescriptorList {
 public:
  static constexpr std::size_t kMaxDescriptors = std::size_t{1} << 31;

  /// `rows` are (address, bytes, device) of each; `ranges` are sorted and do not overlap. Throws
  /// Error(kInvalidUsage) where a descriptor is empty or lies in no range.
  DescriptorList(std::span<const std::uint64_t> rows, std::span<const ListRange> ranges);

  [[nodiscard]] std::size_t size() const { return addresses_.size(); }
  [[nodiscard]] std::uint64_t address(std::size_t index) const { return addresses_[index]; }
  [[nodiscard]] std::uint64_t num_bytes(std::size_t index) const {
    return common_bytes_ != 0 ? common_bytes_ : lengths_[index];
  }
  /// The length that all have; 0 where they differ.
  [[nodiscard]] std::uint64_t common_bytes() const { return common_bytes_; }
  /// All addresses and lengths, or-ed together.
  [[nodiscard]] std::uint64_t bits() const { return bits_; }
  /// Which ranges hold a descriptor, in their order.
  [[nodiscard]] const std::vector<std::uint32_t>& ranges_used() const { return ranges_used_; }

  /// Copies the addresses to a GPU, once: transfers look them up there from then on. Not while
  /// another thread uses the list.
  void place_on(int device);
  /// Where they lie there; 0 where place_on() was not called.
  [[nodiscard]] std::uint64_t device_addresses() const {
    return on_device_ ? on_device_->address() : 0;
  }

 private:
  std::vector<std::uint64_t> addresses_;
  std::vector<std::uint64_t> lengths_;  // empty where they are all common_bytes_
  std::uint64_t common_bytes_ = 0;
  std::uint64_t bits_ = 0;
  std::vector<std::uint32_t> ranges_used_;
  std::unique_ptr<DeviceBuffer> on_device_;
};

/// Chosen descriptors of one list to as many of another, as a plan. An address is a segment: its
/// upper part a block, its lower 32 bits a slot, in units of what divides all addresses and
/// lengths. So whatever copies plans copies lists, at 16 bytes a descriptor.
class ListPlan {
 public:
  struct Side {
    const DescriptorList& list;
    std::span<const std::int64_t> indices;
  };

  /// Throws Error(kInvalidUsage) where the sides have no indices or unequally many, an index is not
  /// of the list, or the lengths of a pair differ, or more than 256 different lengths are chosen.
  ListPlan(const Side& src, const Side& dst);

  /// A view: as long as this lives.
  [[nodiscard]] CopyPlan plan() const;
  /// How to find the places; null where the segments are places, as they are for all but long lists
  /// of one length on a GPU. Needs both lists while the copy is posted and runs.
  [[nodiscard]] const SegmentLookup* lookup() const {
    return lookup_.unit_bytes == 0 ? nullptr : &lookup_;
  }

 private:
  void check(const Side& src, const Side& dst) const;
  void add_numbers(const Side& src, const Side& dst);
  void add_places(const Side& src, const Side& dst, std::span<const std::uint32_t> order);
  void add_box(std::size_t first, std::size_t count, std::uint64_t num_bytes);
  [[nodiscard]] Segment place(std::uint64_t src, std::uint64_t dst) const;

  std::uint32_t unit_bytes_;
  std::uint32_t unit_bits_;  // log2 of it
  std::vector<Segment> segments_;
  std::vector<CopyBox> boxes_;
  SegmentLookup lookup_{};
};

}  // namespace kvxfer
