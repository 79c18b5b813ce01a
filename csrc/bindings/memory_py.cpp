#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>

#include "bindings/bindings.hpp"
#include "core/check.hpp"
#include "memory/process.hpp"
#include "memory/shared_segment.hpp"
#include "transport/completion_board.hpp"

namespace kvxfer::bindings {

namespace {

// The C structures of the DLPack exchange protocol (dmlc/dlpack, ABI of version 0.x, which every
// producer still offers to a consumer that names no version).
struct DlDevice {
  std::int32_t type;
  std::int32_t id;
};
struct DlDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct DlTensor {
  void* data;
  DlDevice device;
  std::int32_t num_dimensions;
  DlDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: row-major
  std::uint64_t byte_offset;
};
struct DlManagedTensor {
  DlTensor tensor;
  void* manager;
  void (*deleter)(DlManagedTensor*);
};

/// What a DLPack capsule says. The capsule stays the owner and keeps the memory alive.
struct ArrayInfo {
  std::uint64_t address;
  std::uint64_t num_bytes;
  std::uint64_t itemsize_bytes;
  std::int32_t device_type;
  std::int32_t device_id;
  bool contiguous;
};

ArrayInfo read_dlpack(const py::capsule& capsule) {
  // Any other name means another structure behind the pointer, or one whose memory is given away.
  const char* name = capsule.name();
  KVXFER_REQUIRE(name != nullptr && std::string(name) == "dltensor",
                 std::string("a capsule named ") + (name == nullptr ? "nothing" : name) +
                     "; use one named dltensor, fresh from __dlpack__");
  const auto* managed = capsule.get_pointer<DlManagedTensor>();
  const DlTensor& tensor = managed->tensor;
  const std::uint64_t itemsize =
      (static_cast<std::uint64_t>(tensor.dtype.bits) * tensor.dtype.lanes + 7) / 8;
  std::uint64_t num_items = 1;
  bool contiguous = true;
  for (int axis = tensor.num_dimensions - 1; axis >= 0; --axis) {
    const auto length = static_cast<std::uint64_t>(tensor.shape[axis]);
    if (tensor.strides != nullptr && length > 1 &&
        static_cast<std::uint64_t>(tensor.strides[axis]) != num_items) {
      contiguous = false;
    }
    num_items *= length;
  }
  return {reinterpret_cast<std::uint64_t>(tensor.data) + tensor.byte_offset,
          num_items * itemsize,
          itemsize,
          tensor.device.type,
          tensor.device.id,
          contiguous};
}

}  // namespace

void register_memory(py::module_& module) {
  py::class_<ArrayInfo>(module, "ArrayInfo", "Address, size and device of an array.")
      .def_readonly("address", &ArrayInfo::address)
      .def_readonly("num_bytes", &ArrayInfo::num_bytes)
      .def_readonly("itemsize_bytes", &ArrayInfo::itemsize_bytes)
      .def_readonly("device_type", &ArrayInfo::device_type)
      .def_readonly("device_id", &ArrayInfo::device_id)
      .def_readonly("contiguous", &ArrayInfo::contiguous);
  module.def("read_dlpack", &read_dlpack, py::arg("capsule"),
             "Read a 'dltensor' capsule; the capsule keeps the memory alive.");

  py::class_<SharedSegment>(module, "SharedSegment", py::buffer_protocol(),
                            "Sealed anonymous memory that several processes map.")
      .def_static("create", &SharedSegment::create, py::arg("num_bytes"), ReleaseGil())
      .def_static("open", &SharedSegment::open, py::arg("pid"), py::arg("fd"), py::arg("num_bytes"),
                  ReleaseGil())
      .def_property_readonly("address", &SharedSegment::address)
      .def_property_readonly("num_bytes", &SharedSegment::num_bytes)
      .def_property_readonly("fd", &SharedSegment::fd)
      .def_buffer([](SharedSegment& segment) {
        return py::buffer_info(static_cast<std::uint8_t*>(segment.data()),
                               static_cast<py::ssize_t>(segment.num_bytes()));
      });

  py::class_<ProcessIdentity>(module, "ProcessIdentity",
                              "A process told apart from all others on this host.")
      .def(py::init<int, std::uint64_t, std::uint64_t>(), py::arg("pid"), py::arg("start_ticks"),
           py::arg("pid_namespace"))
      .def_readonly("pid", &ProcessIdentity::pid)
      .def_readonly("start_ticks", &ProcessIdentity::start_ticks)
      .def_readonly("pid_namespace", &ProcessIdentity::pid_namespace);
  module.def("process_identity", &process_identity, py::arg("pid") = 0);
  module.def("require_same_process", &require_same_process, py::arg("expected"));

  py::class_<CompletionBoard>(module, "CompletionBoard",
                              "Sequence numbers in shared memory that say: the data is visible.")
      .def(py::init<std::uint64_t, std::uint32_t>(), py::arg("address"), py::arg("num_slots"))
      .def_property_readonly_static(
          "SLOT_BYTES",
          [](const py::object&) -> std::size_t { return CompletionBoard::kSlotBytes; })
      .def_property_readonly("num_slots", &CompletionBoard::num_slots)
      .def("slot_address", &CompletionBoard::slot_address, py::arg("slot"))
      .def("signal", &CompletionBoard::signal, py::arg("slot"), py::arg("sequence"))
      .def("load", &CompletionBoard::load, py::arg("slot"))
      .def("wait", &CompletionBoard::wait, py::arg("slot"), py::arg("sequence"),
           py::arg("timeout_s"), ReleaseGil());
}

}  // namespace kvxfer::bindings
