#pragma once

#include <cstdint>

#include "copy/copy_plan.hpp"
#include "copy/device_copier.hpp"
#include "copy/kernel_box.hpp"
#include "copy/segment_lookup.hpp"

namespace kvxfer {

// Tables up to this size ride in the kernel's parameters, which saves a copy to the device; 2.9 KiB
// covers a request of a few pages in a model of up to 80 layers.
constexpr int kInlineWords = 376;

/// What a kernel gets; `LaunchTables` says what the tables hold.
struct KernelArgs {
  const std::uint64_t* tables;  // null: inline_tables
  std::uint32_t num_planes;
  std::uint32_t num_segments;
  std::uint32_t num_boxes;
  std::uint32_t num_groups;
  std::uint32_t word_bytes;  // of the destination; see common_word_bytes()
  Conversion conversion;
  CopyFault fault;
  std::uint32_t* arrivals;
  std::uint64_t* flag;
  std::uint64_t sequence;
  std::uint64_t inline_tables[kInlineWords];
};

constexpr std::uint32_t kMaxConvertedSlotBytes = 4096;  // what a warp's registers hold at once

struct BulkLaunch {
  int num_blocks;
  BulkShape shape;
};

/// Lets the bulk kernel of the current device use up to `shared_bytes` a block; once, before
/// launches.
void prepare_bulk_copy(int shared_bytes);
/// `stream` is a cudaStream_t. Launches throw Error(kCuda) where the launch fails.
void launch_bulk_copy(const KernelArgs& args, const BulkLaunch& launch, void* stream);
void launch_load_store_copy(const KernelArgs& args, int num_blocks, void* stream);
/// Puts the places that `lookup` finds in the stead of numbers in `num_segments` segments at device
/// address `segments`.
void launch_look_up(const SegmentLookup& lookup, std::uint64_t segments, std::uint32_t num_segments,
                    void* stream);
/// Signals from one thread: the end of a chain of copy-engine copies.
void launch_signal(const KernelArgs& args, void* stream);

}  // namespace kvxfer
