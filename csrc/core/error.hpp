#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace kvxfer {

/// Every kind of failure the core reports. The binding looks all of their names up in
/// kvxfer/errors.py, so a kind added here without a class there fails the import, not the first
/// error.
enum class ErrorKind {
  kInvalidUsage,
  kRegistration,
  kNotAvailable,
  kCuda,
  kSystem,
  kTransferFailed,
  kTransferTimeout,
  kPeerLost,
  kCount,
};

/// The class in kvxfer/errors.py that stands for `kind`.
const char* python_class_name(ErrorKind kind) noexcept;

/// The one exception of the core. `code` is an errno or a CUDA status; 0 where neither applies.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, int code = 0)
      : std::runtime_error(message), kind_(kind), code_(code) {}

  [[nodiscard]] ErrorKind kind() const noexcept { return kind_; }
  [[nodiscard]] int code() const noexcept { return code_; }

 private:
  ErrorKind kind_;
  int code_;
};

/// Throws Error(kSystem) with errno's text; `what` names the call and its arguments.
[[noreturn]] void throw_errno(const std::string& what);
[[noreturn]] void throw_errno(ErrorKind kind, const std::string& what, int error_number);

}  // namespace kvxfer
