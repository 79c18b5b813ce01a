#include "transport/completion_board.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "core/check.hpp"

namespace kvxfer {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::milliseconds(20);
constexpr double kForeverS = 1e9;
constexpr auto kNap = std::chrono::microseconds(50);

std::atomic_ref<std::uint64_t> flag(std::uint64_t address) {
  return std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(address));
}

}  // namespace

CompletionBoard::CompletionBoard(std::uint64_t address, std::uint32_t num_slots)
    : address_(address), num_slots_(num_slots) {
  KVXFER_REQUIRE(address != 0 && address % kSlotBytes == 0,
                 "a completion board at " + std::to_string(address) + "; align it to 64 bytes");
  KVXFER_REQUIRE(num_slots > 0, "a completion board needs at least one slot");
}

std::uint64_t CompletionBoard::slot_address(std::uint32_t slot) const {
  KVXFER_REQUIRE(slot < num_slots_, "completion slot " + std::to_string(slot) + " of a board of " +
                                        std::to_string(num_slots_));
  return address_ + slot * kSlotBytes;
}

void CompletionBoard::signal(std::uint32_t slot, std::uint64_t sequence) const {
  flag(slot_address(slot)).store(sequence, std::memory_order_release);
}

std::uint64_t CompletionBoard::load(std::uint32_t slot) const {
  return flag(slot_address(slot)).load(std::memory_order_acquire);
}

bool CompletionBoard::wait(std::uint32_t slot, std::uint64_t sequence, double timeout_s) const {
  const auto value = flag(slot_address(slot));
  const auto start = Clock::now();
  // Longer than a clock can count is for ever; what is no number is no wait.
  const double bounded_s = timeout_s > 0 ? std::min(timeout_s, kForeverS) : 0;
  const auto deadline =
      start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded_s));
  while (value.load(std::memory_order_acquire) < sequence) {
    const auto now = Clock::now();
    if (now >= deadline) return false;
    if (now - start > kSpin) std::this_thread::sleep_for(kNap);
  }
  return true;
}

}  // namespace kvxfer
