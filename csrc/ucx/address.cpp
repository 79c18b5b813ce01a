#include "ucx/address.hpp"

#include <arpa/inet.h>

#include "core/error.hpp"

namespace kvxfer::ucx {

SocketAddress::SocketAddress(const std::string& host, std::uint16_t port) {
  auto* four = reinterpret_cast<sockaddr_in*>(&storage_);
  auto* six = reinterpret_cast<sockaddr_in6*>(&storage_);
  if (::inet_pton(AF_INET, host.c_str(), &four->sin_addr) == 1) {
    four->sin_family = AF_INET;
    four->sin_port = htons(port);
    num_bytes_ = sizeof(*four);
  } else if (::inet_pton(AF_INET6, host.c_str(), &six->sin6_addr) == 1) {
    six->sin6_family = AF_INET6;
    six->sin6_port = htons(port);
    num_bytes_ = sizeof(*six);
  } else {
    throw Error(ErrorKind::kInvalidUsage,
                "'" + host + "' is no numeric IP address; ucx takes no host names");
  }
}

std::uint16_t port_of(const sockaddr_storage& address) {
  const bool is_six = address.ss_family == AF_INET6;
  return ntohs(is_six ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                      : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

}  // namespace kvxfer::ucx
