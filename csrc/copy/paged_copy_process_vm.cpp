#include <sys/uio.h>

#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "copy/fp8.hpp"
#include "copy/paged_copy_host.hpp"
#include "copy/plan_units.hpp"
#include "core/error.hpp"

namespace kvxfer {

namespace {

// The kernel takes at most IOV_MAX (1024) entries on either side of a call.
constexpr std::size_t kMaxIovecs = 1024;
// A cross-memory call moves a little less than INT_MAX bytes: a call is full at this many, and one
// more run of this many still fits.
constexpr std::uint64_t kMaxRunBytes = 1ull << 29;
// Of converted elements, a thread: stays in its cache between the conversion and the call.
constexpr std::uint64_t kBounceBytes = 256 << 10;

void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

[[noreturn]] void throw_cross_memory(int pid, RemoteSide remote, std::uint64_t moved,
                                     std::uint64_t wanted, int error_number) {
  const char* call = remote == RemoteSide::kDestination ? "process_vm_writev" : "process_vm_readv";
  const std::string what = std::string(call) + " with process " + std::to_string(pid) + " moved " +
                           std::to_string(moved) + " of " + std::to_string(wanted) + " bytes";
  switch (error_number) {
    case ESRCH:
      throw Error(ErrorKind::kPeerLost, what + ": the process is gone", error_number);
    case EPERM:
      throw Error(
          ErrorKind::kNotAvailable,
          what +
              ": the kernel denies access to its memory; run both as one user, allow it with "
              "prctl(PR_SET_PTRACER) or kernel.yama.ptrace_scope=0, or put the pages in a "
              "shared segment",
          error_number);
    default:
      throw_errno(ErrorKind::kTransferFailed, what, error_number);
  }
}

/// The next call: runs of this process and of the other one.
class CrossMemoryBatch {
 public:
  CrossMemoryBatch(int pid, RemoteSide remote) : pid_(pid), remote_side_(remote) {}

  void add(const iovec& local_run, const iovec& remote_run) {
    append(local_, local_run);
    append(remote_, remote_run);
    num_bytes_ += local_run.iov_len;
  }
  [[nodiscard]] bool full() const {
    return local_.size() == kMaxIovecs || remote_.size() == kMaxIovecs ||
           num_bytes_ >= kMaxRunBytes;
  }
  void flush() {
    if (local_.empty()) return;
    const auto call =
        remote_side_ == RemoteSide::kDestination ? process_vm_writev : process_vm_readv;
    const ssize_t moved =
        call(pid_, local_.data(), local_.size(), remote_.data(), remote_.size(), 0);
    if (moved < 0 || static_cast<std::uint64_t>(moved) != num_bytes_) {
      // A short count without an error means that the kernel met an unmapped address part-way.
      throw_cross_memory(pid_, remote_side_, moved < 0 ? 0 : static_cast<std::uint64_t>(moved),
                         num_bytes_, moved < 0 ? errno : EFAULT);
    }
    local_.clear();
    remote_.clear();
    num_bytes_ = 0;
  }

 private:
  // The two lists are byte streams that need not be cut alike: each remote entry costs a lock and a
  // walk of the other process's page tables, so neighbours are joined.
  static void append(std::vector<iovec>& list, const iovec& run) {
    if (!list.empty()) {
      iovec& last = list.back();
      if (static_cast<char*>(last.iov_base) + last.iov_len == run.iov_base) {
        last.iov_len += run.iov_len;
        return;
      }
    }
    list.push_back(run);
  }

  int pid_;
  RemoteSide remote_side_;
  std::vector<iovec> local_;
  std::vector<iovec> remote_;
  std::uint64_t num_bytes_ = 0;
};

/// Runs as they are, straight between the two memories.
class DirectMover {
 public:
  DirectMover(const CopyPlan&, int pid, RemoteSide remote)
      : writes_(remote == RemoteSide::kDestination), batch_(pid, remote) {}

  void add(const CopyRun& run, std::uint64_t run_bytes) {
    const iovec src{pointer(run.src), run_bytes};
    const iovec dst{pointer(run.dst), run_bytes};
    batch_.add(writes_ ? src : dst, writes_ ? dst : src);
    if (batch_.full()) finish();
  }
  void finish() { batch_.flush(); }

 private:
  bool writes_;
  CrossMemoryBatch batch_;
};

/// Runs that are converted on this side, before a write or after a read, by way of a buffer.
class ConvertingMover {
 public:
  ConvertingMover(const CopyPlan& plan, int pid, RemoteSide remote)
      : plan_(plan),
        writes_(remote == RemoteSide::kDestination),
        batch_(pid, remote),
        buffer_(std::make_unique_for_overwrite<char[]>(kBounceBytes)) {}

  void add(const CopyRun& run, std::uint64_t run_bytes) {
    const std::uint64_t num_bytes = writes_ ? run_bytes / 2 : run_bytes;
    if (num_used_ + num_bytes > kBounceBytes) finish();
    char* const bounce = buffer_.get() + num_used_;
    num_used_ += num_bytes;
    if (writes_) {
      convert_run(plan_.conversion, bounce, pointer(run.src), run_bytes / 2,
                  plan_.inverse_scales[run.scale]);
      batch_.add({bounce, num_bytes}, {pointer(run.dst), num_bytes});
    } else {
      batch_.add({bounce, num_bytes}, {pointer(run.src), num_bytes});
      arriving_.push_back({bounce, run, run_bytes / 2});
    }
    if (batch_.full()) finish();
  }
  void finish() {
    batch_.flush();
    for (const Arrival& arrival : arriving_) {
      convert_run(plan_.conversion, pointer(arrival.run.dst), arrival.bounce, arrival.num_elements,
                  plan_.inverse_scales[arrival.run.scale]);
    }
    arriving_.clear();
    num_used_ = 0;
  }

 private:
  struct Arrival {
    const char* bounce;
    CopyRun run;
    std::uint64_t num_elements;
  };

  const CopyPlan& plan_;
  bool writes_;
  CrossMemoryBatch batch_;
  std::unique_ptr<char[]> buffer_;
  std::uint64_t num_used_ = 0;
  std::vector<Arrival> arriving_;
};

template <class Mover>
void move_all(WorkerPool& pool, const CopyPlan& plan, int pid, RemoteSide remote,
              std::uint64_t max_run_bytes) {
  const OrderSide side =
      remote == RemoteSide::kDestination ? OrderSide::kDestination : OrderSide::kSource;
  const PlanUnits units(plan, side, pool.num_threads(), max_run_bytes);
  pool.run(units.total_work(), [&](std::uint64_t begin, std::uint64_t end) {
    Mover mover(plan, pid, remote);
    units.for_each_unit(begin, end, [&](const CopyUnit& unit) {
      for_each_run(unit, [&](const CopyRun& run) { mover.add(run, unit.run_bytes); });
    });
    mover.finish();
  });
}

}  // namespace

void paged_copy_process_vm(WorkerPool& pool, const CopyPlan& plan, int pid, RemoteSide remote) {
  if (plan.conversion == Conversion::kNone) {
    move_all<DirectMover>(pool, plan, pid, remote, kMaxRunBytes);
  } else {
    move_all<ConvertingMover>(pool, plan, pid, remote, kBounceBytes);
  }
}

}  // namespace kvxfer
