#pragma once

#include <cstddef>
#include <cstdint>

namespace kvxfer {

/// Flags in a shared segment by which a writer tells a reader that data is visible. Each slot is
/// one 64-bit sequence number on a cache line of its own; it only grows. Host writers store it with
/// release order after their data; a kernel stores it at system scope from its last block. A view
/// of memory that somebody else keeps alive.
class CompletionBoard {
 public:
  static constexpr std::size_t kSlotBytes = 64;

  /// `address` is 64-byte aligned and holds `num_slots` slots.
  CompletionBoard(std::uint64_t address, std::uint32_t num_slots);

  [[nodiscard]] std::uint32_t num_slots() const noexcept { return num_slots_; }
  [[nodiscard]] std::uint64_t slot_address(std::uint32_t slot) const;

  void signal(std::uint32_t slot, std::uint64_t sequence) const;
  [[nodiscard]] std::uint64_t load(std::uint32_t slot) const;
  /// Waits until the slot holds `sequence` or more; false at the deadline. Spins first, then sleeps
  /// in short steps, so that a waiting thread does not starve the copying ones for long.
  [[nodiscard]] bool wait(std::uint32_t slot, std::uint64_t sequence, double timeout_s) const;

 private:
  std::uint64_t address_;
  std::uint32_t num_slots_;
};

}  // namespace kvxfer
