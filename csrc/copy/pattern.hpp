#pragma once

#include <cstdint>

#include "copy/copy_plan.hpp"
#include "copy/fp8.hpp"
#include "core/check.hpp"
#include "core/worker_pool.hpp"

namespace kvxfer {

/// The test pattern: every 8-byte word of a vector depends on the seed, the vector's key and the
/// word's place, so a permuted, shifted, duplicated or stale vector cannot pass. The mixer is the
/// finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
/// OOPSLA 2014).
KVXFER_HOST_DEVICE inline std::uint64_t pattern_word(std::uint64_t seed, std::uint64_t key,
                                                     std::uint64_t word) {
  std::uint64_t value = seed + key * 0xd1342543de82ef95ull + (word + 1) * 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

/// What the pattern has at one word of a vector: its low `num_bytes` bytes, the first one lowest.
struct PatternChunk {
  std::uint64_t bits;
  std::uint32_t num_bytes;
};

/// Vectors to fill or to check: one for each plane, token of a segment, and head. What a vector
/// holds depends on its plane, token and head alone, never on where it lies, so caches of different
/// layouts can be compared. A page is what one segment has in one plane. A view.
struct PatternPages {
  static constexpr std::uint32_t kMaxHeads = 4096;  // that a token's keys have room for

  const std::uint64_t* planes;        // base addresses
  const std::uint64_t* plane_keys;    // further apart than the keys of all tokens and heads
  const std::uint64_t* offsets;       // of a segment's first token and head in a plane, in bytes
  const std::uint64_t* token_keys;    // of a segment's first token; the next has one more
  const std::uint32_t* token_counts;  // of a segment
  const float* inverse_scales;        // [num_planes][num_heads] where there is a conversion
  std::uint32_t num_planes;
  std::uint32_t num_segments;
  std::uint64_t token_stride;  // bytes
  std::uint64_t head_stride;
  std::uint32_t num_heads;
  std::uint32_t first_head;    // the index of the first head in the whole model
  std::uint64_t vector_bytes;  // even; of the source where the vectors have been converted
  Conversion conversion;       // what the vectors went through since they were filled

  KVXFER_HOST_DEVICE std::uint64_t num_pages() const {
    return static_cast<std::uint64_t>(num_planes) * num_segments;
  }
  KVXFER_HOST_DEVICE std::uint64_t words_per_vector() const { return (vector_bytes + 7) / 8; }
  /// Bytes in memory for each whole word of the pattern.
  KVXFER_HOST_DEVICE std::uint32_t chunk_bytes() const {
    return conversion == Conversion::kNone ? 8 : 4;
  }

  struct Vector {
    std::uint64_t address;
    std::uint64_t key;
  };
  KVXFER_HOST_DEVICE Vector vector(std::uint32_t plane, std::uint32_t segment, std::uint32_t token,
                                   std::uint32_t head) const {
    return {planes[plane] + offsets[segment] + token * token_stride + head * head_stride,
            plane_keys[plane] + (token_keys[segment] + token) * kMaxHeads + first_head + head};
  }
};

/// What word `word` of a vector becomes in memory.
template <Conversion kConversion>
KVXFER_HOST_DEVICE PatternChunk pattern_chunk(const PatternPages& pages, std::uint64_t seed,
                                              std::uint64_t key, std::uint64_t word,
                                              float inverse_scale) {
  const std::uint64_t bits = pattern_word(seed, key, word);
  const std::uint64_t left = pages.vector_bytes - word * 8;
  const auto num_bytes = static_cast<std::uint32_t>(left < 8 ? left : 8);
  if constexpr (kConversion == Conversion::kNone) {
    return {bits, num_bytes};
  } else {
    std::uint64_t converted = 0;
    for (std::uint32_t element = 0; element < 4; ++element) {
      const auto source = static_cast<std::uint16_t>(bits >> (16 * element));
      const std::uint64_t byte = convert_element<kConversion>(source, inverse_scale);
      converted |= byte << (8 * element);
    }
    return {converted, num_bytes / 2};
  }
}

/// How much of a chunk differs from `found`, which has its bytes in the same order: 0 or 1 words,
/// and bytes of converted vectors.
template <Conversion kConversion>
KVXFER_HOST_DEVICE std::uint32_t count_wrong(const PatternChunk& chunk, std::uint64_t found) {
  const std::uint64_t difference = (chunk.bits ^ found) & (~0ull >> (64 - 8 * chunk.num_bytes));
  if constexpr (kConversion == Conversion::kNone) return difference != 0;
  std::uint32_t num_wrong = 0;
  for (int byte = 0; byte < 4; ++byte) num_wrong += ((difference >> (8 * byte)) & 0xff) != 0;
  return num_wrong;
}

inline void require_fillable(const PatternPages& pages) {
  KVXFER_REQUIRE(pages.conversion == Conversion::kNone,
                 "a fill with a conversion; fill the source and copy it");
}

/// The outcome of a check: how many words differ (of converted vectors: bytes), and the first page,
/// plane * num_segments + segment, that has one.
struct PatternMismatch {
  std::uint64_t num_wrong_words = 0;
  std::uint64_t first_page = ~0ull;
};

/// Writes the pattern. Throws Error(kInvalidUsage) where `pages` has a conversion.
void pattern_fill_host(WorkerPool& pool, const PatternPages& pages, std::uint64_t seed);
PatternMismatch pattern_check_host(WorkerPool& pool, const PatternPages& pages, std::uint64_t seed);

}  // namespace kvxfer
