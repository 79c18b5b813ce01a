#pragma once

#include <pybind11/pybind11.h>

namespace kvxfer::bindings {

namespace py = pybind11;

/// For calls that wait or copy: other Python threads run meanwhile.
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

void register_errors(py::module_& module);
void register_memory(py::module_& module);
void register_copy(py::module_& module);
void register_lists(py::module_& module);
void register_device(py::module_& module);
void register_ucx(py::module_& module);

}  // namespace kvxfer::bindings
