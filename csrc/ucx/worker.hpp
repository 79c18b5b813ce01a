#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "ucx/context.hpp"
#include "ucx/library.hpp"
#include "ucx/wire.hpp"

namespace kvxfer::ucx {

using Clock = std::chrono::steady_clock;
/// Steady time plus a number of seconds, however large.
Clock::time_point after(double seconds);

class Worker;

/// The data of an active message as it arrives. It is there (`data`) only until the handler
/// returns, unless it is a rendezvous, whose data has yet to be fetched.
class Arrival {
 public:
  Arrival(Worker& worker, void* data, std::size_t num_bytes, bool rendezvous)
      : worker_(&worker), data_(data), num_bytes_(num_bytes), rendezvous_(rendezvous) {}
  Arrival(Arrival&& other) noexcept
      : worker_(other.worker_),
        data_(std::exchange(other.data_, nullptr)),
        num_bytes_(other.num_bytes_),
        rendezvous_(other.rendezvous_),
        kept_(std::exchange(other.kept_, false)) {}
  Arrival& operator=(Arrival&&) = delete;
  ~Arrival();

  [[nodiscard]] std::size_t num_bytes() const noexcept { return num_bytes_; }
  [[nodiscard]] bool is_rendezvous() const noexcept { return rendezvous_; }
  [[nodiscard]] bool is_taken() const noexcept { return data_ == nullptr; }
  [[nodiscard]] std::span<const std::byte> data() const {
    return {static_cast<const std::byte*>(data_), num_bytes_};
  }

  /// The rendezvous, to be fetched after the handler has returned; dropped with its owner.
  Arrival keep() {
    Arrival kept(std::move(*this));
    kept.kept_ = true;
    return kept;
  }
  /// Gives the rendezvous up to UCX, which fetches it.
  void* consume() { return std::exchange(data_, nullptr); }

 private:
  Worker* worker_;
  void* data_;
  std::size_t num_bytes_;
  bool rendezvous_;
  bool kept_ = false;
};

/// What a worker's active messages go to. Called inside Worker::progress.
class Receiver {
 public:
  virtual ~Receiver() = default;
  /// Must not throw.
  virtual void on_message(Message message, ucp_ep_h from, std::span<const std::byte> header,
                          Arrival& arrival) noexcept = 0;
};

/// A UCX worker: what its one thread at a time drives all its endpoints with.
class Worker {
 public:
  Worker(std::shared_ptr<Context> context, Receiver& receiver);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// Does what there is to do; false where there was nothing.
  bool progress() { return library_->ucp_worker_progress(worker_) != 0; }
  /// Sleeps until there is something to do, `wake` is called, or the time is over.
  void sleep(double timeout_s);
  /// Ends a sleep; from any thread.
  void wake() { (void)library_->ucp_worker_signal(worker_); }
  /// Leaves the worker behind for ever: where UCX may still write through it.
  void abandon() noexcept { abandoned_ = true; }

  [[nodiscard]] ucp_worker_h handle() const noexcept { return worker_; }
  [[nodiscard]] Context& context() const noexcept { return *context_; }
  [[nodiscard]] const Library& lib() const noexcept { return *library_; }

 private:
  struct Route {
    Worker* worker;
    Message message;
  };
  static ucs_status_t on_message(void* route, const void* header, std::size_t header_bytes,
                                 void* data, std::size_t num_bytes,
                                 const ucp_am_recv_param_t* param) noexcept;
  void listen_to(Message message);

  std::shared_ptr<Context> context_;
  const Library* library_;
  Receiver& receiver_;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;
  bool abandoned_ = false;
  std::array<Route, static_cast<std::size_t>(Message::kCount)> routes_{};
};

}  // namespace kvxfer::ucx
