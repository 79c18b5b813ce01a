#pragma once

#include <cstddef>
#include <memory>

#include "copy/row_plan.hpp"
#include "core/worker_pool.hpp"
#include "ucx/staging.hpp"

namespace kvxfer::ucx {

/// What copies between pages and the slots of one connection: threads, before a call returns, or a
/// GPU, some time after it. Used by the connection's thread alone.
class SlotCopies {
 public:
  virtual ~SlotCopies() = default;
  /// Begins to fill a slot with rows, or to empty it. The side's tables stay until it is done.
  virtual void gather(const SidePlan& side, const SidePlan::Box& box, const RowRange& rows,
                      std::byte* slot) = 0;
  virtual void scatter(const SidePlan& side, const SidePlan::Box& box, const RowRange& rows,
                       const std::byte* slot) = 0;
  /// How many SMs later copies take of a GPU. Throws Error(kInvalidUsage) where it has fewer.
  virtual void use_sms(int /*num_sms*/) {}
  /// Whether what was begun last on a slot is done and visible to all. Throws Error(kCuda) where
  /// the GPU has failed.
  [[nodiscard]] virtual bool is_done(const std::byte* slot) = 0;
  /// Waits, though not for ever, until nothing is under way: no page is read or written any more.
  virtual void drain() noexcept = 0;
};

/// Whether pages are reached by `SlotCopies` alone: UCX can then neither fetch into a page nor send
/// from one, and what arrives eagerly has no way into a page.
[[nodiscard]] bool needs_slots(const Settings& settings);

/// The copies that fit the settings. `pool` and `staging` outlive them; slots are those of
/// `staging`.
std::unique_ptr<SlotCopies> make_copies(const Settings& settings, WorkerPool& pool,
                                        Staging& staging);

}  // namespace kvxfer::ucx
