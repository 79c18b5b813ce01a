#include <pybind11/stl.h>

#include <optional>
#include <span>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/tables.hpp"
#include "copy/device_copier.hpp"
#include "copy/list_copy.hpp"
#include "copy/paged_copy_host.hpp"
#include "core/check.hpp"

namespace kvxfer::bindings {

namespace {

constexpr py::ssize_t kColumns = 3;

template <class T>
std::span<const T> row_of(const Table<T>& table, const char* what) {
  KVXFER_REQUIRE(table.ndim() == 1, std::string(what) + " have " + std::to_string(table.ndim()) +
                                        " axes; give one row");
  return {table.data(), static_cast<std::size_t>(table.size())};
}

std::span<const std::uint64_t> rows_of(const Table<std::uint64_t>& table, const char* what) {
  KVXFER_REQUIRE(table.ndim() == 2 && table.shape(1) == kColumns,
                 std::string("the table of ") + what + " is not [n, 3]");
  return {table.data(), static_cast<std::size_t>(table.size())};
}

std::vector<ListRange> ranges_of(const Table<std::uint64_t>& table) {
  const auto numbers = rows_of(table, "ranges");
  std::vector<ListRange> ranges;
  for (std::size_t at = 0; at < numbers.size(); at += kColumns) {
    ranges.push_back({numbers[at], numbers[at + 1], numbers[at + 2]});
    const bool follows = at == 0 || ranges[ranges.size() - 2].end <= ranges.back().begin;
    KVXFER_REQUIRE(follows && ranges.back().begin < ranges.back().end,
                   "range " + std::to_string(at / kColumns) +
                       " is empty, or overlaps the one before, or begins before it; sort them");
  }
  return ranges;
}

}  // namespace

void register_lists(py::module_& module) {
  py::class_<DescriptorList>(
      module, "DescriptorList",
      "One side's descriptors: rows uint64 [n, 3] (address, bytes, device); ranges uint64 [m, 3]\n"
      "(begin, end, shift modulo 2^64), sorted, one of which holds each descriptor.")
      .def(py::init([](const Table<std::uint64_t>& rows, const Table<std::uint64_t>& ranges) {
             const auto numbers = rows_of(rows, "descriptors");
             const auto sorted = ranges_of(ranges);
             const GilRelease released;
             return std::make_unique<DescriptorList>(numbers, sorted);
           }),
           py::arg("rows").noconvert(), py::arg("ranges").noconvert())
      .def("__len__", &DescriptorList::size)
      .def_property_readonly("ranges_used", &DescriptorList::ranges_used,
                             "Which ranges hold a descriptor, by their places in the table.")
      .def("place_on", &DescriptorList::place_on, py::arg("device"), ReleaseGil(),
           "Copy the addresses to a GPU, which looks them up there from then on.");
  py::class_<ListPlan>(
      module, "ListPlan",
      "Chosen descriptors of one list to as many of another; indices are int64 [n]. It keeps the\n"
      "lists alive.")
      .def(py::init([](const DescriptorList& src, const Table<std::int64_t>& src_indices,
                       const DescriptorList& dst, const Table<std::int64_t>& dst_indices) {
             const ListPlan::Side from{src, row_of(src_indices, "indices")};
             const ListPlan::Side to{dst, row_of(dst_indices, "indices")};
             const GilRelease released;
             return std::make_unique<ListPlan>(from, to);
           }),
           py::arg("src"), py::arg("src_indices").noconvert(), py::arg("dst"),
           py::arg("dst_indices").noconvert(), py::keep_alive<1, 2>(), py::keep_alive<1, 4>())
      .def_property_readonly(
          "num_bytes", [](const ListPlan& self) { return self.plan().total_bytes(); },
          "Bytes that are copied.")
      .def_property_readonly(
          "looks_up", [](const ListPlan& self) { return self.lookup() != nullptr; },
          "Whether a GPU finds the addresses in its own memory.")
      .def(
          "copy_host",
          [](const ListPlan& self, WorkerPool& pool, bool bypass_cache) {
            paged_copy_host(pool, self.plan(), bypass_cache);
          },
          py::arg("pool"), py::arg("bypass_cache"), ReleaseGil(),
          "Copy between addresses that are both mapped here; returns when done.")
      .def(
          "copy_process_vm",
          [](const ListPlan& self, WorkerPool& pool, int pid, bool remote_is_destination) {
            paged_copy_process_vm(
                pool, self.plan(), pid,
                remote_is_destination ? RemoteSide::kDestination : RemoteSide::kSource);
          },
          py::arg("pool"), py::arg("pid"), py::arg("remote_is_destination"), ReleaseGil(),
          "Copy to or from another process by cross-memory attach; returns when done.")
      .def(
          "post",
          [](const ListPlan& self, DeviceCopier& copier, std::uint32_t slot, std::uint64_t sequence,
             int num_sms, CopyEngine engine) {
            return copier.post(self.plan(), {num_sms, engine, CopyFault::kNone}, {slot, sequence},
                               nullptr, self.lookup());
          },
          py::arg("copier"), py::arg("slot"), py::arg("sequence"), py::arg("num_sms"),
          py::arg("engine"), ReleaseGil(), "Queue the copy on a GPU; see DeviceCopier.post.");
}

}  // namespace kvxfer::bindings
