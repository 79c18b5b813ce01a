#include <pybind11/stl.h>

#include "bindings/bindings.hpp"
#include "bindings/tables.hpp"
#include "copy/paged_copy_host.hpp"
#include "core/worker_pool.hpp"

namespace kvxfer::bindings {

void register_copy(py::module_& module) {
  py::class_<WorkerPool>(module, "WorkerPool", "Threads that share one copy at a time.")
      .def(py::init<int>(), py::arg("num_threads"))
      .def_property_readonly("num_threads", &WorkerPool::num_threads);

  py::class_<PlanTables>(
      module, "PlanTables",
      "A copy plan's tables, kept alive: planes uint64 [P], segments uint32 [S, 4] (src_block,\n"
      "dst_block, src_slot, dst_slot), boxes uint64 [B, 19] (first_plane, num_planes,\n"
      "first_segment, num_segments, src_block_stride, dst_block_stride, src_slot_stride,\n"
      "dst_slot_stride, outer_count, outer_src_stride, outer_dst_stride, inner_count,\n"
      "inner_src_stride, inner_dst_stride, run_bytes, first_scale, scale_plane_step,\n"
      "outer_scale_step, inner_scale_step; strides in bytes), inverse_scales float32 [N], all\n"
      "C-contiguous; conversion none, bfloat16 or float16 (to e4m3).")
      .def(py::init<Table<std::uint64_t>, Table<std::uint64_t>, Table<std::uint32_t>,
                    const Table<std::uint64_t>&, Table<float>, const std::string&>(),
           py::arg("src_planes").noconvert(), py::arg("dst_planes").noconvert(),
           py::arg("segments").noconvert(), py::arg("boxes").noconvert(),
           py::arg("inverse_scales").noconvert(), py::arg("conversion"))
      .def_property_readonly(
          "num_bytes", [](const PlanTables& self) { return self.plan().total_bytes(); },
          "Bytes written at the destination.");

  py::class_<PatternTables>(
      module, "PatternTables",
      "Vectors that carry the test pattern: planes and plane_keys uint64 [P]; offsets and\n"
      "token_keys uint64 [S] and token_counts uint32 [S] of the segments; strides and\n"
      "vector_bytes in bytes, the latter of the source where a conversion to e4m3 lies between;\n"
      "inverse_scales float32 [P * num_heads], or nothing without a conversion.")
      .def(py::init<Table<std::uint64_t>, Table<std::uint64_t>, Table<std::uint64_t>,
                    Table<std::uint64_t>, Table<std::uint32_t>, std::uint64_t, std::uint64_t,
                    std::uint32_t, std::uint32_t, std::uint64_t, const std::string&,
                    const std::optional<Table<float>>&>(),
           py::arg("planes").noconvert(), py::arg("plane_keys").noconvert(),
           py::arg("offsets").noconvert(), py::arg("token_keys").noconvert(),
           py::arg("token_counts").noconvert(), py::arg("token_stride"), py::arg("head_stride"),
           py::arg("num_heads"), py::arg("first_head"), py::arg("vector_bytes"),
           py::arg("conversion") = "none", py::arg("inverse_scales").noconvert() = py::none());

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
