#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "copy/copy_plan.hpp"
#include "copy/pattern.hpp"
#include "copy/segment_lookup.hpp"
#include "copy/stream_mark.hpp"
#include "transport/completion_board.hpp"

namespace kvxfer {

/// What carries the bytes of a device copy.
enum class CopyEngine {
  kAuto,       ///< the copy engine for long runs, else a kernel
  kBulk,       ///< bulk-asynchronous (TMA) kernel; sm_90 and later
  kLoadStore,  ///< load/store kernel; any GPU
  kDma,        ///< the GPU's copy engine, one copy a run
};

/// Planted faults, for the tests that prove the completion rule: a checker that passes with
/// kSignalEarly checks nothing.
enum class CopyFault {
  kNone,
  kDelayBlock0,  ///< block 0 waits some milliseconds before it copies
  kSignalEarly,  ///< as kDelayBlock0, and the first block done signals for all
};

struct DeviceCopyOptions {
  int num_sms = 0;  ///< thread blocks, one an SM; 0 = all
  CopyEngine engine = CopyEngine::kAuto;
  CopyFault fault = CopyFault::kNone;
};

/// Shape of the bulk kernel. Zeros stand for the measured best.
struct BulkShape {
  int num_warps = 0;    ///< warps a block
  int num_stages = 0;   ///< slots of shared memory a warp
  int slot_bytes = 0;   ///< bytes of a slot; small pages share one
  int store_depth = 0;  ///< stores a warp leaves in flight before it refills a slot, 1 to 4
};

struct CompletionTarget {
  std::uint32_t slot;
  std::uint64_t sequence;
};

/// Runs copy plans on one GPU, in order, on a stream of its own, and signals each on a completion
/// board after its data is visible. Thread-safe. Destruction waits for what is in flight, because
/// kernels read this object's tables.
class DeviceCopier {
 public:
  static constexpr int kMaxInFlight = 64;

  /// `board_address` is host memory of `board_slots` slots which the GPU will write; it is
  /// registered with CUDA here and stays registered as long as this object lives.
  DeviceCopier(int device, std::uint64_t board_address, std::uint32_t board_slots);
  ~DeviceCopier();
  DeviceCopier(const DeviceCopier&) = delete;
  DeviceCopier& operator=(const DeviceCopier&) = delete;

  /// Queues `plan` and returns what will carry it. Sequences of a slot start at 1 and grow.
  /// The plan's tables are read before this returns.
  /// Source and destination are touched only once `after` is reached; null = at once. The mark is
  /// not needed any more when this returns.
  /// Nothing is in flight of what it throws for: where CUDA refuses the middle of it, this waits.
  /// With `lookup` the plan's segments are numbers of descriptors, see SegmentLookup.
  CopyEngine post(const CopyPlan& plan, const DeviceCopyOptions& options, CompletionTarget target,
                  const StreamMark* after, const SegmentLookup* lookup = nullptr);
  /// Waits for the flag; throws Error(kCuda) at once where the GPU reports a fault. False at the
  /// deadline.
  bool wait(CompletionTarget target, double timeout_s);
  void set_bulk_shape(const BulkShape& shape);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Fills or checks pattern pages with a kernel of `device`; both return when done.
void pattern_fill_device(int device, const PatternPages& pages, std::uint64_t seed);
PatternMismatch pattern_check_device(int device, const PatternPages& pages, std::uint64_t seed);

}  // namespace kvxfer
