#pragma once

#include <cstdint>

#include "copy/copy_plan.hpp"
#include "core/worker_pool.hpp"

namespace kvxfer {

/// The test pattern: every 8-byte word of a page depends on the seed, the page's key and the word's
/// place, so a permuted, shifted, duplicated or stale page cannot pass. The mixer is the finaliser
/// of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
KVXFER_HOST_DEVICE inline std::uint64_t pattern_word(std::uint64_t seed, std::uint64_t key,
                                                     std::uint64_t word) {
  std::uint64_t value = seed + key * 0xd1342543de82ef95ull + (word + 1) * 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

/// Pages to fill or to check: page (plane p, block b) lies at planes[p] + offsets[b] and has the
/// key plane_keys[p] + block_keys[b]. A view; page_bytes is a multiple of 8.
struct PatternPages {
  const std::uint64_t* planes;
  const std::uint64_t* plane_keys;
  const std::uint64_t* offsets;
  const std::uint64_t* block_keys;
  std::uint32_t num_planes;
  std::uint32_t num_blocks;
  std::uint64_t page_bytes;

  KVXFER_HOST_DEVICE std::uint64_t num_pages() const {
    return static_cast<std::uint64_t>(num_planes) * num_blocks;
  }
  KVXFER_HOST_DEVICE std::uint64_t address(std::uint64_t page) const {
    return planes[page / num_blocks] + offsets[page % num_blocks];
  }
  KVXFER_HOST_DEVICE std::uint64_t key(std::uint64_t page) const {
    return plane_keys[page / num_blocks] + block_keys[page % num_blocks];
  }
};

/// The outcome of a check: how many words differ, and the first page in order that has one.
struct PatternMismatch {
  std::uint64_t num_wrong_words = 0;
  std::uint64_t first_page = ~0ull;
};

void pattern_fill_host(WorkerPool& pool, const PatternPages& pages, std::uint64_t seed);
PatternMismatch pattern_check_host(WorkerPool& pool, const PatternPages& pages, std::uint64_t seed);

}  // namespace kvxfer
