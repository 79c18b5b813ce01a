#include "core/error.hpp"

#include <cerrno>
#include <cstring>

namespace kvxfer {

const char* python_class_name(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::kInvalidUsage:
      return "InvalidUsage";
    case ErrorKind::kRegistration:
      return "RegistrationError";
    case ErrorKind::kNotAvailable:
      return "NotAvailable";
    case ErrorKind::kCuda:
      return "CudaError";
    case ErrorKind::kSystem:
      return "SystemCallError";
    case ErrorKind::kTransferFailed:
      return "TransferFailed";
    case ErrorKind::kTransferTimeout:
      return "TransferTimeout";
    case ErrorKind::kPeerLost:
      return "PeerLost";
    case ErrorKind::kCount:
      break;
  }
  return "(a kind without a class)";
}

void throw_errno(const std::string& what) { throw_errno(ErrorKind::kSystem, what, errno); }

void throw_errno(ErrorKind kind, const std::string& what, int error_number) {
  throw Error(kind, what + ": " + std::strerror(error_number), error_number);
}

}  // namespace kvxfer
