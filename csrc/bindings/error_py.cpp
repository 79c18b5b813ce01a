#include "bindings/bindings.hpp"
#include "core/error.hpp"

namespace kvxfer::bindings {

namespace {

constexpr ErrorKind kAllKinds[] = {
    ErrorKind::kInvalidUsage,    ErrorKind::kRegistration,
    ErrorKind::kNotAvailable,    ErrorKind::kCuda,
    ErrorKind::kSystem,          ErrorKind::kTransferFailed,
    ErrorKind::kTransferTimeout, ErrorKind::kPeerLost,
};

py::object error_class(ErrorKind kind) {
  return py::module_::import("kvxfer.errors").attr(python_class_name(kind));
}

}  // namespace

void register_errors(py::module_&) {
  for (const ErrorKind kind : kAllKinds) (void)error_class(kind);
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const Error& error) {
      const py::object type = error_class(error.kind());
      PyErr_SetObject(type.ptr(), type(error.what(), error.code()).ptr());
    }
  });
}

}  // namespace kvxfer::bindings
