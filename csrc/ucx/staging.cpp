#include "ucx/staging.hpp"

#include <sys/mman.h>

#include <string>

#include "core/check.hpp"
#include "ucx/wire.hpp"

namespace kvxfer::ucx {

Staging::Staging(std::shared_ptr<Context> context, const Settings& settings)
    : context_(std::move(context)),
      slot_bytes_(settings.slot_bytes),
      num_slots_(settings.num_slots),
      is_pinned_(settings.staging == StagingKind::kPinned) {
  KVXFER_REQUIRE(
      slot_bytes_ >= 4096 && slot_bytes_ <= kMaxSlotBytes && slot_bytes_ % 4096 == 0,
      "slots of " + std::to_string(slot_bytes_) + " bytes; use a multiple of 4 KiB up to 64 MiB");
  KVXFER_REQUIRE(num_slots_ >= 1 && num_slots_ <= 64,
                 std::to_string(num_slots_) + " staging slots; use 1 to 64");
}

Staging::~Staging() {
  memory_.reset();
  pinned_.reset();
  if (base_ != nullptr) (void)::munmap(base_, slot_bytes_ * num_slots_);
}

std::byte* Staging::take() {
  if (base_ == nullptr) {
    const std::uint64_t num_bytes = slot_bytes_ * num_slots_;
    void* mapped =
        ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw_errno("mmap of " + std::to_string(num_bytes) + " bytes");
    base_ = static_cast<std::byte*>(mapped);
    if (is_pinned_) pinned_.emplace(reinterpret_cast<std::uint64_t>(mapped), num_bytes);
    memory_ = context_->register_memory(reinterpret_cast<std::uint64_t>(mapped), num_bytes);
    for (std::uint32_t at = num_slots_; at > 0; --at)
      free_.push_back(base_ + (at - 1) * slot_bytes_);
  }
  ++num_taken_;
  std::byte* slot = free_.back();
  free_.pop_back();
  return slot;
}

void Staging::give_back(std::byte* slot) {
  --num_taken_;
  free_.push_back(slot);  // the last one used first: it is still in the cache
}

}  // namespace kvxfer::ucx
