#include "bindings/bindings.hpp"
#include "bindings/tables.hpp"
#include "copy/paged_copy_host.hpp"
#include "core/worker_pool.hpp"

namespace kvxfer::bindings {

void register_copy(py::module_& module) {
  py::class_<WorkerPool>(module, "WorkerPool", "Threads that share one copy at a time.")
      .def(py::init<int>(), py::arg("num_threads"))
      .def_property_readonly("num_threads", &WorkerPool::num_threads);

  py::class_<PlanTables>(module, "PlanTables",
                         "The tables of a copy plan, kept alive: four 1-D uint64 arrays.")
      .def(py::init<Table, Table, Table, Table, std::uint64_t>(), py::arg("src_planes"),
           py::arg("dst_planes"), py::arg("src_offsets"), py::arg("dst_offsets"),
           py::arg("page_bytes"));

  py::class_<PatternTables>(module, "PatternTables",
                            "Pages that carry the test pattern: four 1-D uint64 arrays.")
      .def(py::init<Table, Table, Table, Table, std::uint64_t>(), py::arg("planes"),
           py::arg("plane_keys"), py::arg("offsets"), py::arg("block_keys"), py::arg("page_bytes"));

  py::class_<PatternMismatch>(module, "PatternMismatch", "What a pattern check found.")
      .def_readonly("num_wrong_words", &PatternMismatch::num_wrong_words)
      .def_readonly("first_page", &PatternMismatch::first_page);

  module.def(
      "paged_copy_host",
      [](WorkerPool& pool, const PlanTables& tables, bool bypass_cache) {
        paged_copy_host(pool, tables.plan(), bypass_cache);
      },
      py::arg("pool"), py::arg("tables"), py::arg("bypass_cache"), ReleaseGil(),
      "Copy between addresses that are both mapped here; returns when done.");
  module.def(
      "paged_copy_process_vm",
      [](WorkerPool& pool, const PlanTables& tables, int pid, bool remote_is_destination) {
        paged_copy_process_vm(
            pool, tables.plan(), pid,
            remote_is_destination ? RemoteSide::kDestination : RemoteSide::kSource);
      },
      py::arg("pool"), py::arg("tables"), py::arg("pid"), py::arg("remote_is_destination"),
      ReleaseGil(), "Copy to or from another process by cross-memory attach; returns when done.");
  module.def(
      "pattern_fill_host",
      [](WorkerPool& pool, const PatternTables& tables, std::uint64_t seed) {
        pattern_fill_host(pool, tables.pages(), seed);
      },
      py::arg("pool"), py::arg("tables"), py::arg("seed"), ReleaseGil());
  module.def(
      "pattern_check_host",
      [](WorkerPool& pool, const PatternTables& tables, std::uint64_t seed) {
        return pattern_check_host(pool, tables.pages(), seed);
      },
      py::arg("pool"), py::arg("tables"), py::arg("seed"), ReleaseGil());
}

}  // namespace kvxfer::bindings
