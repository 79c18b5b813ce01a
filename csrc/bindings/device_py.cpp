#include <pybind11/stl.h>

#include "bindings/bindings.hpp"
#include "bindings/tables.hpp"
#include "copy/device_copier.hpp"
#include "copy/stream_mark.hpp"
#include "memory/device.hpp"
#include "memory/device_context.hpp"
#include "memory/ipc.hpp"
#include "memory/pointer_chase.hpp"

namespace kvxfer::bindings {

namespace {

void register_devices(py::module_& module) {
  py::class_<DeviceInfo>(module, "DeviceInfo", "One GPU as the CUDA runtime describes it.")
      .def_readonly("index", &DeviceInfo::index)
      .def_readonly("name", &DeviceInfo::name)
      .def_readonly("uuid", &DeviceInfo::uuid)
      .def_readonly("pci_bus_id", &DeviceInfo::pci_bus_id)
      .def_readonly("compute_major", &DeviceInfo::compute_major)
      .def_readonly("compute_minor", &DeviceInfo::compute_minor)
      .def_readonly("num_sms", &DeviceInfo::num_sms)
      .def_readonly("memory_bytes", &DeviceInfo::memory_bytes)
      .def_readonly("memory_gb_per_s", &DeviceInfo::memory_gb_per_s);
  py::class_<PointerInfo>(module, "PointerInfo", "The allocation behind a device address.")
      .def_readonly("device", &PointerInfo::device)
      .def_readonly("base", &PointerInfo::base)
      .def_readonly("num_bytes", &PointerInfo::num_bytes)
      .def_readonly("buffer_id", &PointerInfo::buffer_id)
      .def_readonly("legacy_ipc", &PointerInfo::legacy_ipc);
  module.def("device_count", &device_count, ReleaseGil());
  module.def("no_device_reason", &no_device_reason, ReleaseGil());
  module.def("device_info", &device_info, py::arg("device"), ReleaseGil());
  module.def("can_access_peer", &can_access_peer, py::arg("from_device"), py::arg("to_device"),
             ReleaseGil());
  module.def("enable_peer_access", &enable_peer_access, py::arg("from_device"),
             py::arg("to_device"), ReleaseGil());
  module.def("pointer_info", &pointer_info, py::arg("address"), ReleaseGil());
  module.def("buffer_id", &buffer_id, py::arg("address"));
  py::class_<DeviceBuffer>(module, "DeviceBuffer", "Device memory from cudaMalloc.")
      .def(py::init<int, std::uint64_t>(), py::arg("device"), py::arg("num_bytes"), ReleaseGil())
      .def_property_readonly("device", &DeviceBuffer::device)
      .def_property_readonly("address", &DeviceBuffer::address)
      .def_property_readonly("num_bytes", &DeviceBuffer::num_bytes);
  py::class_<DeviceContext>(module, "DeviceContext",
                            "A GPU's primary context: current in a thread from enter to leave.")
      .def(py::init<int>(), py::arg("device"), ReleaseGil())
      .def("enter", &DeviceContext::enter)
      .def("leave", &DeviceContext::leave);
}

void register_probes(py::module_& module) {
  py::class_<PinnedRange>(module, "PinnedRange",
                          "Host memory that is page-locked while this lives.")
      .def(py::init<std::uint64_t, std::uint64_t>(), py::arg("address"), py::arg("num_bytes"),
           ReleaseGil());
  py::class_<ChaseResult>(module, "ChaseResult", "What a GPU read last, and how long a read took.")
      .def_readonly("last_index", &ChaseResult::last_index)
      .def_readonly("ns_per_hop", &ChaseResult::ns_per_hop);
  module.def(
      "chase_pointers",
      [](int device, std::uint64_t address, std::uint64_t num_slots, std::uint64_t stride_bytes,
         std::uint32_t num_hops) {
        return chase_pointers(device, {address, num_slots, stride_bytes}, num_hops);
      },
      py::arg("device"), py::arg("address"), py::arg("num_slots"), py::arg("stride_bytes"),
      py::arg("num_hops"), ReleaseGil(),
      "Follow a ring of indices from slot 0 with one thread; returns when done.");
}

void register_ipc(py::module_& module) {
  py::class_<IpcExport>(module, "IpcExport", "A device range made openable for other processes.")
      .def(py::init<std::uint64_t, std::uint64_t>(), py::arg("address"), py::arg("num_bytes"),
           ReleaseGil())
      .def_property_readonly("device", &IpcExport::device)
      .def_property_readonly("buffer_id", &IpcExport::buffer_id)
      .def_property_readonly("offset_bytes", &IpcExport::offset_bytes)
      .def_property_readonly("legacy_handle",
                             [](const IpcExport& self) { return py::bytes(self.legacy_handle()); })
      .def_property_readonly("chunk_fds", &IpcExport::chunk_fds)
      .def_property_readonly("chunk_bytes", &IpcExport::chunk_bytes);
  py::class_<IpcMapping>(module, "IpcMapping", "A peer's allocation mapped for a local device.")
      .def_static(
          "open_legacy",
          [](int device, const py::bytes& handle, std::uint64_t num_bytes) {
            const std::string raw = handle;
            const GilRelease released;
            return IpcMapping::open_legacy(device, raw, num_bytes);
          },
          py::arg("device"), py::arg("handle"), py::arg("num_bytes"))
      .def_static("open_chunks", &IpcMapping::open_chunks, py::arg("device"), py::arg("pid"),
                  py::arg("fds"), py::arg("chunk_bytes"), ReleaseGil())
      .def_property_readonly("address", &IpcMapping::address)
      .def_property_readonly("num_bytes", &IpcMapping::num_bytes);
}

void register_copier(py::module_& module) {
  py::enum_<CopyEngine>(module, "CopyEngine", "What carries a device copy.")
      .value("AUTO", CopyEngine::kAuto)
      .value("BULK", CopyEngine::kBulk)
      .value("LOAD_STORE", CopyEngine::kLoadStore)
      .value("DMA", CopyEngine::kDma);
  py::enum_<CopyFault>(module, "CopyFault", "Planted faults, for tests alone.")
      .value("NONE", CopyFault::kNone)
      .value("DELAY_BLOCK_0", CopyFault::kDelayBlock0)
      .value("SIGNAL_EARLY", CopyFault::kSignalEarly);
  py::class_<StreamMark>(
      module, "StreamMark",
      "A point in a CUDA stream's work: all that was queued on it when this object was made.")
      .def(py::init<int, std::uint64_t>(), py::arg("device"), py::arg("stream"), ReleaseGil())
      .def_property_readonly("device", &StreamMark::device)
      .def("is_reached", &StreamMark::is_reached, ReleaseGil(),
           "Whether the work before the mark is done.");
  py::class_<DeviceCopier>(module, "DeviceCopier", "Runs copy plans on one GPU, in order.")
      .def(py::init<int, std::uint64_t, std::uint32_t>(), py::arg("device"),
           py::arg("board_address"), py::arg("board_slots"), ReleaseGil())
      .def_property_readonly_static("MAX_IN_FLIGHT",
                                    [](const py::object&) { return DeviceCopier::kMaxInFlight; })
      .def(
          "post",
          [](DeviceCopier& self, const PlanTables& tables, std::uint32_t slot,
             std::uint64_t sequence, int num_sms, CopyEngine engine, CopyFault fault,
             std::optional<const StreamMark*> after) {
            return self.post(tables.plan(), {num_sms, engine, fault}, {slot, sequence},
                             after.value_or(nullptr));
          },
          py::arg("tables"), py::arg("slot"), py::arg("sequence"), py::arg("num_sms") = 0,
          py::arg("engine") = CopyEngine::kAuto, py::arg("fault") = CopyFault::kNone,
          py::arg("after") = py::none(), ReleaseGil())
      .def(
          "wait",
          [](DeviceCopier& self, std::uint32_t slot, std::uint64_t sequence, double timeout_s) {
            return self.wait({slot, sequence}, timeout_s);
          },
          py::arg("slot"), py::arg("sequence"), py::arg("timeout_s"), ReleaseGil())
      .def(
          "set_bulk_shape",
          [](DeviceCopier& self, int num_warps, int num_stages, int slot_bytes, int store_depth) {
            self.set_bulk_shape({num_warps, num_stages, slot_bytes, store_depth});
          },
          py::arg("num_warps"), py::arg("num_stages"), py::arg("slot_bytes"),
          py::arg("store_depth"), ReleaseGil());
}

}  // namespace

void register_device(py::module_& module) {
  register_devices(module);
  register_probes(module);
  register_ipc(module);
  register_copier(module);
  module.def(
      "pattern_fill_device",
      [](int device, const PatternTables& tables, std::uint64_t seed) {
        pattern_fill_device(device, tables.pages(), seed);
      },
      py::arg("device"), py::arg("tables"), py::arg("seed"), ReleaseGil());
  module.def(
      "pattern_check_device",
      [](int device, const PatternTables& tables, std::uint64_t seed) {
        return pattern_check_device(device, tables.pages(), seed);
      },
      py::arg("device"), py::arg("tables"), py::arg("seed"), ReleaseGil());
}

}  // namespace kvxfer::bindings
