#include "core/worker_pool.hpp"

#include <string>

#include "core/check.hpp"

namespace kvxfer {

namespace {
constexpr int kMaxThreads = 256;
}

WorkerPool::WorkerPool(int num_threads) {
  KVXFER_REQUIRE(num_threads >= 1 && num_threads <= kMaxThreads,
                 "num_threads is " + std::to_string(num_threads) + "; use 1 to " +
                     std::to_string(kMaxThreads));
  threads_.reserve(static_cast<std::size_t>(num_threads) - 1);
  for (int member = 1; member < num_threads; ++member) {
    threads_.emplace_back([this, member] { member_loop(member); });
  }
}

WorkerPool::~WorkerPool() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  start_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void WorkerPool::run(std::uint64_t num_items, const Job& job) {
  std::lock_guard one_job(run_mutex_);
  {
    std::lock_guard lock(mutex_);
    job_ = &job;
    num_items_ = num_items;
    num_running_ = static_cast<int>(threads_.size());
    failure_ = nullptr;
    ++round_;
  }
  start_.notify_all();
  run_slice(0);
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return num_running_ == 0; });
  job_ = nullptr;
  if (failure_) std::rethrow_exception(failure_);
}

void WorkerPool::run_slice(int member) noexcept {
  const auto team = static_cast<std::uint64_t>(num_threads());
  const auto index = static_cast<std::uint64_t>(member);
  const std::uint64_t quotient = num_items_ / team;
  const std::uint64_t remainder = num_items_ % team;
  const std::uint64_t begin = index * quotient + (index < remainder ? index : remainder);
  const std::uint64_t end = begin + quotient + (index < remainder ? 1 : 0);
  try {
    if (begin < end) (*job_)(begin, end);
  } catch (...) {
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
  }
}

void WorkerPool::member_loop(int member) {
  std::uint64_t seen_round = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    start_.wait(lock, [&] { return stopping_ || round_ != seen_round; });
    if (stopping_) return;
    seen_round = round_;
    lock.unlock();
    run_slice(member);
    lock.lock();
    if (--num_running_ == 0) finished_.notify_one();
  }
}

}  // namespace kvxfer
