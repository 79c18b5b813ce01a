#include "core/worker_pool.hpp"

#include <unistd.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "core/check.hpp"

namespace kvxfer {

namespace {
constexpr int kMaxThreads = 256;
}

/// The threads and what they share; its end stops and joins them.
class WorkerPool::Team {
 public:
  explicit Team(int num_threads) : num_members_(num_threads) {}
  ~Team() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    start_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  void start() {
    threads_.reserve(static_cast<std::size_t>(num_members_) - 1);
    try {
      for (int member = 1; member < num_members_; ++member) {
        threads_.emplace_back([this, member] { member_loop(member); });
      }
    } catch (const std::system_error& error) {
      throw Error(ErrorKind::kSystem,
                  "thread " + std::to_string(threads_.size() + 2) + " of " +
                      std::to_string(num_members_) + " could not start: " + error.what() +
                      "; use fewer threads",
                  error.code().value());
    }
  }

  [[nodiscard]] int num_members() const noexcept { return num_members_; }

  void run(std::uint64_t num_items, const Job& job) {
    std::lock_guard one_job(run_mutex_);
    {
      std::lock_guard lock(mutex_);
      job_ = &job;
      num_items_ = num_items;
      num_running_ = num_members_ - 1;
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

 private:
  void run_slice(int member) noexcept {
    const auto team = static_cast<std::uint64_t>(num_members_);
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

  void member_loop(int member) {
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

  const int num_members_;
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
  std::vector<std::thread> threads_;
};

WorkerPool::WorkerPool(int num_threads) : owner_(::getpid()) {
  KVXFER_REQUIRE(num_threads >= 1 && num_threads <= kMaxThreads,
                 "num_threads is " + std::to_string(num_threads) + "; use 1 to " +
                     std::to_string(kMaxThreads));
  team_ = std::make_unique<Team>(num_threads);
  team_->start();
}

WorkerPool::~WorkerPool() {
  // The threads are the parent's: joining them here would wait for ever, so the child's copy of the
  // team is left as it is.
  if (owner_ != ::getpid()) (void)team_.release();
}

int WorkerPool::num_threads() const noexcept { return team_->num_members(); }

void WorkerPool::run(std::uint64_t num_items, const Job& job) {
  KVXFER_REQUIRE(owner_ == ::getpid(),
                 "this process was forked from " + std::to_string(owner_) +
                     ", which has the threads of this pool; connect anew after the fork");
  team_->run(num_items, job);
}

}  // namespace kvxfer
