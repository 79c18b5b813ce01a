#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/worker_pool.hpp"
#include "ucx/pieces.hpp"

namespace kvxfer::ucx {

/// What a connection needs of its server.
class Host {
 public:
  virtual ~Host() = default;
  virtual const Secret& secret() const = 0;
  virtual std::vector<Region> regions() const = 0;
  virtual WorkerPool& pool() = 0;
  virtual const Settings& settings() const = 0;
  /// Notes that a peer uses a slot of the board; returns its sequence. Throws
  /// Error(kTransferFailed) for one that does not exist.
  virtual std::uint64_t open_slot(std::uint32_t slot) = 0;
  virtual void close_slot(std::uint32_t slot) = 0;
  /// Throws Error(kPeerLost) once the cache is closed.
  virtual void require_standing() const = 0;
  virtual void signal(std::uint32_t slot, std::uint64_t sequence) = 0;
};

/// A peer of a server and the one transfer it may have under way.
class Connection {
 public:
  Connection(Host& host, Worker& worker, ucp_conn_request_h request);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  [[nodiscard]] ucp_ep_h handle() const noexcept { return channel_.handle(); }
  /// Takes a message. A peer that breaks the rules is told and dropped.
  void on_message(Message message, std::span<const std::byte> header, Arrival& arrival) noexcept;
  /// Moves the transfer on; false where it waits for the peer.
  bool advance() noexcept;
  void drop();
  [[nodiscard]] bool is_gone() const { return channel_.is_closed(); }

 private:
  enum class State { kNew, kIdle, kReceiving, kSending, kLeaving, kDropped };

  void handle(Message message, std::span<const std::byte> header, Arrival& arrival);
  void on_hello(const Hello& hello);
  void begin(Message message, const Begin& begin, Arrival& arrival);
  void finish();
  bool move_on();
  void fail(const Error& error) noexcept;
  void send_fail(const Error& error, bool stands);
  void require_state(bool fits, Message message) const;
  void require_live();

  Host& host_;
  Worker& worker_;
  Staging staging_;
  std::unique_ptr<SlotCopies> copies_;  // from the first transfer on
  Channel channel_;
  Settings settings_;
  State state_ = State::kNew;
  std::optional<std::uint32_t> slot_;
  PeerTakes peer_{};
  Begin transfer_{};
  std::optional<Incoming> incoming_;
  std::optional<Outgoing> outgoing_;
  bool peer_has_all_ = false;
  std::uint64_t num_seen_ = 0;
  std::uint64_t num_messages_ = 0;
  Clock::time_point deadline_;
};

}  // namespace kvxfer::ucx
