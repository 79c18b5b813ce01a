#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "ucx/worker.hpp"

namespace kvxfer::ucx {

/// One endpoint of a worker, and what is in flight on it. Used by the worker's thread alone. Stays
/// where it is: UCX has its address until `is_closed`.
class Channel {
 public:
  /// Is told how an operation ended, inside Worker::progress or at once; must not throw.
  using Done = std::function<void(ucs_status_t)>;

  /// Begins to connect to a numeric address. Throws Error(kPeerLost) where it is seen at once that
  /// nobody is there.
  Channel(Worker& worker, const std::string& host, std::uint16_t port);
  /// Takes a connection that a listener was asked for.
  Channel(Worker& worker, ucp_conn_request_h request);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  /// Sends a header and a copy of `data` behind what was sent before.
  template <class Header>
  void send(Message message, const Header& header, std::vector<std::byte> data = {}) {
    send_bytes(message, std::as_bytes(std::span<const Header>(&header, 1)), std::move(data));
  }
  void send_bytes(Message message, std::span<const std::byte> header, std::vector<std::byte> data);
  /// Sends a piece from `data`, which stays until `done` was called. `memory` registers it, or is
  /// null. With `rendezvous` the peer fetches it, however short it is.
  void send_piece(const Piece& piece, std::span<const std::byte> data, const Memory* memory,
                  bool rendezvous, Done done);
  /// Fetches a rendezvous into `to`, which stays until `done` was called.
  void fetch(Arrival arrival, std::span<std::byte> to, const Memory* memory, Done done);

  /// UCS_OK for as long as the peer is there.
  [[nodiscard]] ucs_status_t status() const noexcept { return status_; }
  [[nodiscard]] std::size_t num_in_flight() const noexcept { return num_in_flight_; }
  /// Operations that have ended; it moves for as long as the peer takes or gives something.
  [[nodiscard]] std::uint64_t num_ended() const noexcept { return num_ended_; }
  [[nodiscard]] ucp_ep_h handle() const noexcept { return endpoint_; }
  /// What UCX reaches the peer by: "tcp/lo", or "posix/memory, cma/memory".
  [[nodiscard]] std::string transports() const;

  /// Drops the connection without waiting for the peer; what is in flight ends with an error.
  void close();
  /// Whether nothing of this is left with UCX. Progress brings it about.
  [[nodiscard]] bool is_closed() const noexcept { return closed_ && num_in_flight_ == 0; }

 private:
  struct Operation;
  void create(ucp_ep_params_t& params, const std::string& what);
  void start(ucs_status_ptr_t request, Operation* operation);
  static void on_error(void* channel, ucp_ep_h, ucs_status_t status) noexcept;
  static void on_sent(void* request, ucs_status_t status, void* operation) noexcept;
  static void on_fetched(void* request, ucs_status_t status, std::size_t num_bytes,
                         void* operation) noexcept;
  static void on_closed(void* request, ucs_status_t status, void* channel) noexcept;

  Worker& worker_;
  ucp_ep_h endpoint_ = nullptr;
  ucs_status_t status_ = UCS_OK;
  std::size_t num_in_flight_ = 0;
  std::uint64_t num_ended_ = 0;
  bool closed_ = false;
};

}  // namespace kvxfer::ucx
