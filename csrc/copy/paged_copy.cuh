#pragma once

#include <cstdint>

#include "copy/copy_plan.hpp"
#include "copy/device_copier.hpp"

namespace kvxfer {

// Tables up to this size ride in the kernel's parameters, which saves a copy to the device; 2 KiB
// covers a request of a few pages in a model of up to 80 layers.
constexpr int kInlineWords = 336;

/// The four tables of a plan, one behind the other, in the order of CopyPlan's members.
struct KernelArgs {
  const std::uint64_t* tables;  // null: inline_tables
  std::uint32_t num_planes;
  std::uint32_t num_blocks;
  std::uint64_t page_bytes;
  // A page is cut into pieces of piece_bytes (the last may be shorter); a group of pieces_per_group
  // pieces shares a slot, one lane a piece.
  std::uint32_t piece_bytes;
  std::uint32_t pieces_per_page;
  std::uint32_t pieces_per_group;
  std::uint32_t num_pieces;
  std::uint32_t word_bytes;  // a power of two that divides every address and length; 16 at most
  std::uint32_t* arrivals;
  std::uint64_t* flag;
  std::uint64_t sequence;
  CopyFault fault;
  std::uint64_t inline_tables[kInlineWords];
};

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
/// Signals from one thread: the end of a chain of copy-engine copies.
void launch_signal(const KernelArgs& args, void* stream);

}  // namespace kvxfer
