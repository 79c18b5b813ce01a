#include <algorithm>
#include <cstring>
#include <mutex>

#include "copy/pattern.hpp"

namespace kvxfer {

namespace {

void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

// Copies of a constant size are one instruction, and nearly all are of whole words.
std::uint64_t load(std::uint64_t address, std::uint32_t num_bytes) {
  std::uint64_t bits = 0;
  if (num_bytes == 8) {
    std::memcpy(&bits, pointer(address), 8);
  } else {
    std::memcpy(&bits, pointer(address), num_bytes);
  }
  return bits;
}

void store(std::uint64_t address, const PatternChunk& chunk) {
  if (chunk.num_bytes == 8) {
    std::memcpy(pointer(address), &chunk.bits, 8);
  } else {
    std::memcpy(pointer(address), &chunk.bits, chunk.num_bytes);
  }
}

/// Calls visit(vector, inverse_scale) for each vector of a page.
template <class Visit>
void for_each_vector(const PatternPages& pages, std::uint64_t page, Visit&& visit) {
  const auto plane = static_cast<std::uint32_t>(page / pages.num_segments);
  const auto segment = static_cast<std::uint32_t>(page % pages.num_segments);
  const float* scales = pages.conversion == Conversion::kNone
                            ? nullptr
                            : pages.inverse_scales + std::uint64_t{plane} * pages.num_heads;
  for (std::uint32_t token = 0; token < pages.token_counts[segment]; ++token) {
    for (std::uint32_t head = 0; head < pages.num_heads; ++head) {
      visit(pages.vector(plane, segment, token, head), scales == nullptr ? 1.0f : scales[head]);
    }
  }
}

template <Conversion kConversion>
std::uint64_t count_wrong_in_page(const PatternPages& pages, std::uint64_t seed,
                                  std::uint64_t page) {
  const std::uint64_t num_words = pages.words_per_vector();
  std::uint64_t num_wrong = 0;
  for_each_vector(pages, page, [&](const PatternPages::Vector& vector, float inverse_scale) {
    for (std::uint64_t word = 0; word < num_words; ++word) {
      const PatternChunk chunk =
          pattern_chunk<kConversion>(pages, seed, vector.key, word, inverse_scale);
      const std::uint64_t address = vector.address + word * pages.chunk_bytes();
      num_wrong += count_wrong<kConversion>(chunk, load(address, chunk.num_bytes));
    }
  });
  return num_wrong;
}

}  // namespace

void pattern_fill_host(WorkerPool& pool, const PatternPages& pages, std::uint64_t seed) {
  require_fillable(pages);
  const std::uint64_t num_words = pages.words_per_vector();
  pool.run(pages.num_pages(), [&](std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t page = begin; page < end; ++page) {
      for_each_vector(pages, page, [&](const PatternPages::Vector& vector, float) {
        for (std::uint64_t word = 0; word < num_words; ++word) {
          store(vector.address + word * 8,
                pattern_chunk<Conversion::kNone>(pages, seed, vector.key, word, 1.0f));
        }
      });
    }
  });
}

PatternMismatch pattern_check_host(WorkerPool& pool, const PatternPages& pages,
                                   std::uint64_t seed) {
  PatternMismatch result;
  std::mutex mutex;
  pool.run(pages.num_pages(), [&](std::uint64_t begin, std::uint64_t end) {
    PatternMismatch own;
    for (std::uint64_t page = begin; page < end; ++page) {
      const std::uint64_t num_wrong =
          with_conversion(pages.conversion, [&]<Conversion kConversion>() {
            return count_wrong_in_page<kConversion>(pages, seed, page);
          });
      own.num_wrong_words += num_wrong;
      if (num_wrong != 0) own.first_page = std::min(own.first_page, page);
    }
    std::lock_guard lock(mutex);
    result.num_wrong_words += own.num_wrong_words;
    result.first_page = std::min(result.first_page, own.first_page);
  });
  return result;
}

}  // namespace kvxfer
