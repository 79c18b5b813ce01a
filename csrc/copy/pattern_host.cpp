#include <algorithm>
#include <mutex>

#include "copy/pattern.hpp"

namespace kvxfer {

void pattern_fill_host(WorkerPool& pool, const PatternPages& pages, std::uint64_t seed) {
  const std::uint64_t num_words = pages.page_bytes / sizeof(std::uint64_t);
  pool.run(pages.num_pages(), [&](std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t page = begin; page < end; ++page) {
      auto* words = reinterpret_cast<std::uint64_t*>(pages.address(page));
      const std::uint64_t key = pages.key(page);
      for (std::uint64_t word = 0; word < num_words; ++word) {
        words[word] = pattern_word(seed, key, word);
      }
    }
  });
}

PatternMismatch pattern_check_host(WorkerPool& pool, const PatternPages& pages,
                                   std::uint64_t seed) {
  const std::uint64_t num_words = pages.page_bytes / sizeof(std::uint64_t);
  PatternMismatch result;
  std::mutex mutex;
  pool.run(pages.num_pages(), [&](std::uint64_t begin, std::uint64_t end) {
    PatternMismatch own;
    for (std::uint64_t page = begin; page < end; ++page) {
      const auto* words = reinterpret_cast<const std::uint64_t*>(pages.address(page));
      const std::uint64_t key = pages.key(page);
      std::uint64_t num_wrong = 0;
      for (std::uint64_t word = 0; word < num_words; ++word) {
        num_wrong += words[word] != pattern_word(seed, key, word);
      }
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
