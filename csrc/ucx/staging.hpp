#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "memory/device.hpp"
#include "ucx/context.hpp"

namespace kvxfer::ucx {

/// What fills and empties slots, which lie in host memory.
enum class StagingKind {
  kHost,       ///< threads: pages are in host memory too
  kPinned,     ///< a GPU that has the pages: it reads and writes the slots over its bus
  kRehearsal,  ///< threads in the way that a GPU does it, for tests where there is none
};

/// How data is cut and how long is waited. Both sides may differ.
struct Settings {
  StagingKind staging = StagingKind::kHost;
  int device = -1;  ///< of kPinned
  std::uint64_t slot_bytes = 2 << 20;
  std::uint32_t num_slots = 4;
  /// Rows of this many bytes or more travel by themselves, without a copy on either side.
  std::uint64_t direct_bytes = 256 << 10;
  /// A row is cut into pieces of at most this much, so that several are on their way.
  std::uint64_t max_direct_bytes = 8 << 20;
  std::uint32_t num_direct = 8;
  /// How long a transfer may stand still.
  double stall_s = 20;
  double connect_s = 10;
  /// Of a GPU's copies. A bus carries no more than eight SMs do.
  int num_sms = 8;
};

/// Registered slots between pages and the wire, allocated at the first use.
class Staging {
 public:
  /// Throws Error(kInvalidUsage) for sizes out of range.
  Staging(std::shared_ptr<Context> context, const Settings& settings);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  [[nodiscard]] std::uint64_t slot_bytes() const noexcept { return slot_bytes_; }
  [[nodiscard]] std::uint32_t num_slots() const noexcept { return num_slots_; }
  /// Which slot one is that was taken, below num_slots.
  [[nodiscard]] std::uint32_t index_of(const std::byte* slot) const noexcept {
    return static_cast<std::uint32_t>(static_cast<std::uint64_t>(slot - base_) / slot_bytes_);
  }
  [[nodiscard]] bool has_free() const noexcept { return num_slots_ > num_taken_; }
  /// A slot, of the ones that `has_free` promised.
  std::byte* take();
  void give_back(std::byte* slot);
  /// The registration of all slots.
  [[nodiscard]] const Memory* memory() const noexcept { return memory_.get(); }

 private:
  std::shared_ptr<Context> context_;
  std::uint64_t slot_bytes_;
  std::uint32_t num_slots_;
  bool is_pinned_;
  std::uint32_t num_taken_ = 0;
  std::byte* base_ = nullptr;
  std::vector<std::byte*> free_;
  std::optional<PinnedRange> pinned_;
  std::shared_ptr<Memory> memory_;
};

}  // namespace kvxfer::ucx
