#pragma once

#include <cstdint>

namespace kvxfer {

/// A ring of indices in memory that one GPU can read: slot k, `stride_bytes` after slot k - 1,
/// begins with the 8-byte index of the slot to read next.
struct IndexRing {
  std::uint64_t address;
  std::uint64_t num_slots;  ///< a power of two: what is read is cut to it, so nothing can fault
  std::uint64_t stride_bytes;
};

struct ChaseResult {
  std::uint64_t last_index;  ///< what the last hop read
  double ns_per_hop;         ///< by the GPU's own clock
};

/// Follows the ring from slot 0 with one thread of `device`: each read waits for the one before, so
/// that the time of a hop is the latency of a read. Returns when done.
ChaseResult chase_pointers(int device, const IndexRing& ring, std::uint32_t num_hops);

}  // namespace kvxfer
