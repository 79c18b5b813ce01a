#include "ucx/slot_copies.hpp"

#include <deque>
#include <exception>
#include <string>
#include <vector>

#include "copy/device_copier.hpp"
#include "copy/paged_copy_host.hpp"
#include "core/check.hpp"
#include "memory/device.hpp"
#include "memory/shared_segment.hpp"

namespace kvxfer::ucx {

namespace {

constexpr double kDrainS = 10;

class HostCopies final : public SlotCopies {
 public:
  explicit HostCopies(WorkerPool& pool) : pool_(pool) {}
  void gather(const SidePlan& side, const SidePlan::Box& box, const RowRange& rows,
              std::byte* slot) override {
    if (rows.num_rows == 1) {
      side.gather_part(box, rows.first_row, rows.first_byte, rows.num_bytes, slot);
    } else {
      side.gather(pool_, box, rows.first_row, rows.num_rows, slot);
    }
  }
  void scatter(const SidePlan& side, const SidePlan::Box& box, const RowRange& rows,
               const std::byte* slot) override {
    side.scatter(pool_, box, rows.first_row, rows.num_rows, slot);
  }
  [[nodiscard]] bool is_done(const std::byte*) override { return true; }
  void drain() noexcept override {}

 private:
  WorkerPool& pool_;
};

class DeviceCopies final : public SlotCopies {
 public:
  DeviceCopies(const Settings& settings, Staging& staging)
      : device_(settings.device),
        num_sms_(settings.num_sms),
        staging_(staging),
        flags_(SharedSegment::create(staging.num_slots() * CompletionBoard::kSlotBytes)),
        posted_(staging.num_slots(), 0),
        copier_(settings.device, flags_.address(), staging.num_slots()) {}

  void gather(const SidePlan& side, const SidePlan::Box& box, const RowRange& rows,
              std::byte* slot) override {
    post(slot, RowPlan::gather(side, box, rows, reinterpret_cast<std::uint64_t>(slot)));
  }
  void scatter(const SidePlan& side, const SidePlan::Box& box, const RowRange& rows,
               const std::byte* slot) override {
    post(slot, RowPlan::scatter(side, box, rows, reinterpret_cast<std::uint64_t>(slot)));
  }
  void use_sms(int num_sms) override {
    if (num_sms == num_sms_) return;
    const int most = device_info(device_).num_sms;
    KVXFER_REQUIRE(num_sms > 0 && num_sms <= most,
                   "num_sms is " + std::to_string(num_sms) + "; GPU " + std::to_string(device_) +
                       " has " + std::to_string(most) + " (0 = the default)");
    num_sms_ = num_sms;
  }
  [[nodiscard]] bool is_done(const std::byte* slot) override {
    const std::uint32_t index = staging_.index_of(slot);
    return copier_.wait({index, posted_[index]}, 0);
  }
  void drain() noexcept override {
    try {
      for (std::uint32_t index = 0; index < posted_.size(); ++index) {
        (void)copier_.wait({index, posted_[index]}, kDrainS);
      }
    } catch (const std::exception&) {
      // The GPU has failed, and writes no more.
    }
  }

 private:
  void post(const std::byte* slot, const RowPlan& rows) {
    const std::uint32_t index = staging_.index_of(slot);
    DeviceCopyOptions options;
    options.num_sms = num_sms_;
    copier_.post(rows.plan(), options, {index, posted_[index] + 1}, nullptr);
    ++posted_[index];
  }

  int device_;
  int num_sms_;
  Staging& staging_;
  SharedSegment flags_;  // goes after the copier, which writes there
  std::vector<std::uint64_t> posted_;
  DeviceCopier copier_;
};

/// Host memory in the way that a GPU's goes: by slots and plans of rows alone, each copy later than
/// it was asked for.
class RehearsedCopies final : public SlotCopies {
 public:
  explicit RehearsedCopies(WorkerPool& pool) : pool_(pool) {}
  void gather(const SidePlan& side, const SidePlan::Box& box, const RowRange& rows,
              std::byte* slot) override {
    const auto wire = reinterpret_cast<std::uint64_t>(slot);
    waiting_.push_back({slot, kNumLooks, RowPlan::gather(side, box, rows, wire)});
  }
  void scatter(const SidePlan& side, const SidePlan::Box& box, const RowRange& rows,
               const std::byte* slot) override {
    const auto wire = reinterpret_cast<std::uint64_t>(slot);
    waiting_.push_back({slot, kNumLooks, RowPlan::scatter(side, box, rows, wire)});
  }
  [[nodiscard]] bool is_done(const std::byte* slot) override {
    for (const Waiting& one : waiting_) {
      if (one.slot != slot) continue;
      if (--waiting_.front().num_looks == 0) run_first();
      return false;
    }
    return true;
  }
  void drain() noexcept override {
    while (!waiting_.empty()) run_first();
  }

 private:
  static constexpr int kNumLooks = 3;
  struct Waiting {
    const std::byte* slot;
    int num_looks;
    RowPlan rows;
  };
  void run_first() {
    paged_copy_host(pool_, waiting_.front().rows.plan(), false);
    waiting_.pop_front();
  }

  WorkerPool& pool_;
  std::deque<Waiting> waiting_;
};

}  // namespace

bool needs_slots(const Settings& settings) { return settings.staging != StagingKind::kHost; }

std::unique_ptr<SlotCopies> make_copies(const Settings& settings, WorkerPool& pool,
                                        Staging& staging) {
  switch (settings.staging) {
    case StagingKind::kPinned:
      return std::make_unique<DeviceCopies>(settings, staging);
    case StagingKind::kRehearsal:
      return std::make_unique<RehearsedCopies>(pool);
    case StagingKind::kHost:
      break;
  }
  return std::make_unique<HostCopies>(pool);
}

}  // namespace kvxfer::ucx
