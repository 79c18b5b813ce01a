#pragma once

#include <cstdint>

namespace kvxfer {

/// What the segments of a plan stand for where they are not places but numbers of descriptors
/// (source in `src_block`, destination in `dst_block`): a kernel puts the places in their stead.
struct SegmentLookup {
  std::uint64_t src_addresses;  // of a table in the memory of the GPU that copies
  std::uint64_t dst_addresses;
  std::uint32_t unit_bytes;
};

}  // namespace kvxfer
