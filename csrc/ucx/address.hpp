#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <string>

namespace kvxfer::ucx {

/// A numeric IPv4 or IPv6 address with a port, in the form of the socket calls.
class SocketAddress {
 public:
  /// Throws Error(kInvalidUsage) for anything but a numeric address.
  SocketAddress(const std::string& host, std::uint16_t port);

  [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  [[nodiscard]] socklen_t num_bytes() const { return num_bytes_; }

 private:
  sockaddr_storage storage_{};
  socklen_t num_bytes_ = 0;
};

/// The port of an address of either family.
std::uint16_t port_of(const sockaddr_storage& address);

}  // namespace kvxfer::ucx
