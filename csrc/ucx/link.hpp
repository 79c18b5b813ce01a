#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "copy/copy_plan.hpp"
#include "ucx/context.hpp"
#include "ucx/staging.hpp"

namespace kvxfer::ucx {

/// Whom to connect to, and what it knows a peer by.
struct ServerAddress {
  std::string host;  // numeric
  std::uint16_t port;
  std::string secret;  // 16 bytes
  std::uint32_t slot;  // of its board
  std::string name;    // for messages
};

/// The connecting side: it posts transfers, one at a time, and drives them in the thread that
/// polls. Calls from several threads must be serialised. Once a transfer has failed halfway the
/// link is broken: every later call throws Error(kPeerLost).
class Link {
 public:
  /// Begins to connect; `poll` finishes it.
  Link(std::shared_ptr<Context> context, ServerAddress server, int num_threads,
       const Settings& settings);
  /// As `close`.
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  /// Begins a transfer of number `sequence` from here to the server, or from there to here. Rows of
  /// `direct_bytes` or more travel by themselves, and a GPU's copies take `num_sms`; 0 = what the
  /// settings say. The plan need not outlive the call.
  void start_put(const CopyPlan& plan, std::uint64_t sequence, std::uint64_t direct_bytes,
                 int num_sms);
  void start_get(const CopyPlan& plan, std::uint64_t sequence, std::uint64_t direct_bytes,
                 int num_sms);
  /// Works for up to `timeout_s`; true once what was begun is complete: connected, or every byte in
  /// place and the server's board signalled. Throws what the server refused with, Error(kPeerLost)
  /// where it is gone, Error(kTransferTimeout) where nothing moves.
  bool poll(double timeout_s);

  /// Sends any bytes as a message, for tests of what a server does with them. `poll` then ends with
  /// its Done or throws its Fail.
  void send_raw(unsigned message, const std::string& header, const std::string& data);

  /// The last number that the server's board had when the link was made.
  [[nodiscard]] std::uint64_t first_sequence() const;
  /// What UCX reaches the server by.
  [[nodiscard]] std::string transports() const;
  /// Ends the connection; waits no longer than a second. False where UCX was not done with a
  /// transfer by then: its pages must stay mapped for as long as the process lives.
  bool close();

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace kvxfer::ucx
