#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

namespace kvxfer::bindings {

namespace py = pybind11;

/// Gives the GIL up for as long as it lives. Not pybind11's: before 3.14 Python ends a daemon
/// thread that asks for the GIL while the interpreter goes by unwinding it, which a destructor may
/// not pass on, so that the process would abort. Such a thread waits here instead until the process
/// has ended.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
      while (true) ::pause();
    }
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

/// For calls that wait or copy: other Python threads run meanwhile.
using ReleaseGil = py::call_guard<GilRelease>;

void register_errors(py::module_& module);
void register_memory(py::module_& module);
void register_copy(py::module_& module);
void register_lists(py::module_& module);
void register_device(py::module_& module);
void register_ucx(py::module_& module);

}  // namespace kvxfer::bindings
