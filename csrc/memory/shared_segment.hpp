#pragma once

#include <cstddef>
#include <cstdint>

#include "core/unique_fd.hpp"

namespace kvxfer {

/// Memory that several processes map: an anonymous file (memfd) sealed against resizing, so that no
/// peer can turn a later access into a SIGBUS, no name is left behind after a kill, and the size of
/// /dev/shm does not matter. Unmapped at the end of its life.
class SharedSegment {
 public:
  /// A new zeroed segment of `num_bytes` (> 0), rounded up to whole system pages.
  static SharedSegment create(std::uint64_t num_bytes);
  /// Maps descriptor `fd` of process `pid`. Throws unless it is a sealed segment of exactly
  /// `num_bytes`: a peer's word is not taken for it.
  static SharedSegment open(int pid, int fd, std::uint64_t num_bytes);

  SharedSegment(SharedSegment&& other) noexcept;
  SharedSegment& operator=(SharedSegment&&) = delete;
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;
  ~SharedSegment();

  [[nodiscard]] void* data() const noexcept { return data_; }
  [[nodiscard]] std::uint64_t address() const noexcept {
    return reinterpret_cast<std::uint64_t>(data_);
  }
  [[nodiscard]] std::uint64_t num_bytes() const noexcept { return num_bytes_; }
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }

 private:
  SharedSegment(UniqueFd fd, std::uint64_t num_bytes, int flags);

  UniqueFd fd_;
  std::uint64_t num_bytes_;
  void* data_ = nullptr;
};

}  // namespace kvxfer
