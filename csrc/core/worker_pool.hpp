#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace kvxfer {

/// A fixed team of threads that share one job at a time. The caller is member 0 of the team, so a
/// pool of one starts no thread.
class WorkerPool {
 public:
  explicit WorkerPool(int num_threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  [[nodiscard]] int num_threads() const noexcept { return static_cast<int>(threads_.size()) + 1; }

  /// Runs job(begin, end) on every member over a near-equal slice of [0, num_items) and returns
  /// when all are done. The first exception of a member is rethrown here. Calls from several
  /// threads queue.
  using Job = std::function<void(std::uint64_t begin, std::uint64_t end)>;
  void run(std::uint64_t num_items, const Job& job);

 private:
  void member_loop(int member);
  void run_slice(int member) noexcept;

  std::vector<std::thread> threads_;
  std::mutex run_mutex_;  // one job at a time
  std::mutex mutex_;      // guards all below
  std::condition_variable start_;
  std::condition_variable finished_;
  const Job* job_ = nullptr;
  std::uint64_t num_items_ = 0;
  std::uint64_t round_ = 0;
  int num_running_ = 0;
  bool stopping_ = false;
  std::exception_ptr failure_;
};

}  // namespace kvxfer
