#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace kvxfer {

/// A fixed team of threads that share one job at a time. The caller is member 0 of the team, so a
/// pool of one starts no thread. Threads do not survive fork(): in a child process the parent's
/// pool refuses jobs, and its end leaves the parent's state alone.
class WorkerPool {
 public:
  /// Throws Error(kInvalidUsage) outside 1 to 256 threads, Error(kSystem) where they cannot start.
  explicit WorkerPool(int num_threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  [[nodiscard]] int num_threads() const noexcept;

  /// Runs job(begin, end) on every member over a near-equal slice of [0, num_items) and returns
  /// when all are done. The first exception of a member is rethrown here. Calls from several
  /// threads queue. Throws Error(kInvalidUsage) in a forked child.
  using Job = std::function<void(std::uint64_t begin, std::uint64_t end)>;
  void run(std::uint64_t num_items, const Job& job);

 private:
  class Team;
  std::unique_ptr<Team> team_;
  pid_t owner_;
};

}  // namespace kvxfer
