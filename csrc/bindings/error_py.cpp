#include "bindings/bindings.hpp"
#include "core/error.hpp"

namespace kvxfer::bindings {

namespace {

py::object error_class(ErrorKind kind) {
  return py::module_::import("kvxfer.errors").attr(python_class_name(kind));
}

}  // namespace

void register_errors(py::module_&) {
  for (int kind = 0; kind < static_cast<int>(ErrorKind::kCount); ++kind) {
    (void)error_class(static_cast<ErrorKind>(kind));
  }
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
