#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "copy/side_plan.hpp"
#include "ucx/context.hpp"
#include "ucx/staging.hpp"

namespace kvxfer::ucx {

/// The board on which a server completes transfers, and what it writes there beside them.
struct ServedBoard {
  std::uint64_t address;
  std::uint32_t num_slots;       // of peers
  std::uint32_t withdrawn_slot;  // not 0 once the cache is closed
};

/// Serves regions of this process to peers that know its secret: a listener, and a thread that
/// takes their transfers (see wire.hpp), moves the pages, and stores a transfer's number on the
/// board once its bytes are in place. Nothing that a peer says is trusted: every byte that a plan
/// names is found inside a region before the first is moved.
class Server {
 public:
  /// `secret` has 16 bytes, `host` is numeric. The board's memory outlives this. Throws
  /// Error(kNotAvailable) where UCX cannot listen there.
  Server(std::shared_ptr<Context> context, const std::string& host, const std::string& secret,
         const ServedBoard& board, int num_threads, const Settings& settings);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  [[nodiscard]] std::uint16_t port() const;
  /// Peers may reach these bytes from now on; they stay mapped until `close` has returned true.
  void add_region(std::uint64_t address, std::uint64_t num_bytes);
  /// Connections that stand.
  [[nodiscard]] std::size_t num_connections() const;
  /// Drops all peers and ends the thread. False where UCX was not done with a peer's transfer in
  /// time: then what was served must stay mapped for as long as the process lives.
  bool close();

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace kvxfer::ucx
