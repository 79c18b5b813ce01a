#include <pybind11/stl.h>

#include "bindings/bindings.hpp"
#include "bindings/tables.hpp"
#include "core/check.hpp"
#include "ucx/context.hpp"
#include "ucx/link.hpp"
#include "ucx/server.hpp"

namespace kvxfer::bindings {

namespace {

ucx::StagingKind parse_staging(const std::string& name) {
  if (name == "host") return ucx::StagingKind::kHost;
  if (name == "pinned") return ucx::StagingKind::kPinned;
  if (name == "rehearsal") return ucx::StagingKind::kRehearsal;
  throw Error(ErrorKind::kInvalidUsage, "staging '" + name + "'; use host, pinned or rehearsal");
}

void register_settings(py::module_& module) {
  py::class_<ucx::Settings>(module, "UcxSettings", "How the ucx transport cuts and waits.")
      .def(py::init([](const std::string& staging, int device, std::uint64_t slot_bytes,
                       std::uint32_t num_slots, std::uint64_t direct_bytes,
                       std::uint64_t max_direct_bytes, std::uint32_t num_direct, double stall_s,
                       double connect_s) {
             KVXFER_REQUIRE(direct_bytes > 0 && max_direct_bytes > 0 && num_direct > 0,
                            "direct rows of no bytes, or none at a time; use 1 or more");
             return ucx::Settings{
                 parse_staging(staging), device,     slot_bytes, num_slots, direct_bytes,
                 max_direct_bytes,       num_direct, stall_s,    connect_s};
           }),
           py::kw_only(), py::arg("staging") = "host", py::arg("device") = -1,
           py::arg("slot_bytes") = ucx::Settings{}.slot_bytes,
           py::arg("num_slots") = ucx::Settings{}.num_slots,
           py::arg("direct_bytes") = ucx::Settings{}.direct_bytes,
           py::arg("max_direct_bytes") = ucx::Settings{}.max_direct_bytes,
           py::arg("num_direct") = ucx::Settings{}.num_direct,
           py::arg("stall_s") = ucx::Settings{}.stall_s,
           py::arg("connect_s") = ucx::Settings{}.connect_s)
      .def_readonly("slot_bytes", &ucx::Settings::slot_bytes)
      .def_readonly("num_slots", &ucx::Settings::num_slots)
      .def_readonly("direct_bytes", &ucx::Settings::direct_bytes)
      .def_readonly("num_sms", &ucx::Settings::num_sms)
      .def_readonly("stall_s", &ucx::Settings::stall_s)
      .def_readonly("connect_s", &ucx::Settings::connect_s);
}

void register_context(py::module_& module) {
  module.def("ucx_load", &ucx::load, py::arg("candidates"), ReleaseGil(),
             "Open the first libucp that fits, once a process; returns its version.");
  py::class_<ucx::Memory, std::shared_ptr<ucx::Memory>>(
      module, "UcxMemory", "A range that UCX has registered, until the last owner is gone.")
      .def_property_readonly("address", &ucx::Memory::address)
      .def_property_readonly("num_bytes", &ucx::Memory::num_bytes);
  py::class_<ucx::Context, std::shared_ptr<ucx::Context>>(
      module, "UcxContext", "One configuration of UCX and the memory registered in it.")
      .def(py::init(&ucx::Context::create), py::arg("options"), py::arg("defaults"), ReleaseGil())
      .def("register_memory", &ucx::Context::register_memory, py::arg("address"),
           py::arg("num_bytes"), ReleaseGil());
}

void register_server(py::module_& module) {
  py::class_<ucx::Server>(module, "UcxServer",
                          "Serves regions of this process to peers, in a thread of its own.")
      .def(py::init([](std::shared_ptr<ucx::Context> context, const std::string& host,
                       const py::bytes& secret, std::uint64_t board_address,
                       std::uint32_t num_slots, std::uint32_t withdrawn_slot, int num_threads,
                       const ucx::Settings& settings) {
             const std::string bytes = secret;
             const GilRelease release;
             return std::make_unique<ucx::Server>(
                 std::move(context), host, bytes,
                 ucx::ServedBoard{board_address, num_slots, withdrawn_slot}, num_threads, settings);
           }),
           py::kw_only(), py::arg("context"), py::arg("host"), py::arg("secret"),
           py::arg("board_address"), py::arg("num_slots"), py::arg("withdrawn_slot"),
           py::arg("num_threads"), py::arg("settings"))
      .def_property_readonly("port", &ucx::Server::port)
      .def_property_readonly("num_connections", &ucx::Server::num_connections)
      .def("add_region", &ucx::Server::add_region, py::arg("address"), py::arg("num_bytes"))
      .def("close", &ucx::Server::close, ReleaseGil(),
           "Drop all peers; False where served memory must stay mapped for good.");
}

void register_link(py::module_& module) {
  py::class_<ucx::Link>(module, "UcxLink", "The connecting side; one transfer at a time.")
      .def(py::init([](std::shared_ptr<ucx::Context> context, const std::string& host,
                       std::uint16_t port, const py::bytes& secret, std::uint32_t slot,
                       const std::string& name, int num_threads, const ucx::Settings& settings) {
             ucx::ServerAddress server{host, port, secret, slot, name};
             const GilRelease release;
             return std::make_unique<ucx::Link>(std::move(context), std::move(server), num_threads,
                                                settings);
           }),
           py::kw_only(), py::arg("context"), py::arg("host"), py::arg("port"), py::arg("secret"),
           py::arg("slot"), py::arg("name"), py::arg("num_threads"), py::arg("settings"))
      .def_property_readonly("first_sequence", &ucx::Link::first_sequence)
      .def_property_readonly("transports", &ucx::Link::transports)
      .def(
          "start_put",
          [](ucx::Link& self, const PlanTables& tables, std::uint64_t sequence,
             std::uint64_t direct_bytes,
             int num_sms) { self.start_put(tables.plan(), sequence, direct_bytes, num_sms); },
          py::arg("tables"), py::arg("sequence"), py::arg("direct_bytes"), py::arg("num_sms") = 0,
          ReleaseGil(), "Begin a transfer to the server; poll until it is complete.")
      .def(
          "start_get",
          [](ucx::Link& self, const PlanTables& tables, std::uint64_t sequence,
             std::uint64_t direct_bytes,
             int num_sms) { self.start_get(tables.plan(), sequence, direct_bytes, num_sms); },
          py::arg("tables"), py::arg("sequence"), py::arg("direct_bytes"), py::arg("num_sms") = 0,
          ReleaseGil(), "Begin a transfer from the server; poll until it is complete.")
      .def(
          "send_raw",
          [](ucx::Link& self, unsigned message, const py::bytes& header, const py::bytes& data) {
            self.send_raw(message, header, data);
          },
          py::arg("message"), py::arg("header"), py::arg("data"),
          "Send any bytes as a message, for tests of what a server does with them.")
      .def("poll", &ucx::Link::poll, py::arg("timeout_s"), ReleaseGil(),
           "Work for up to timeout_s; True once what was begun is complete.")
      .def("close", &ucx::Link::close, ReleaseGil(),
           "End the connection; False where pages must stay mapped for good.");
}

}  // namespace

void register_ucx(py::module_& module) {
  register_settings(module);
  register_context(module);
  register_server(module);
  register_link(module);
}

}  // namespace kvxfer::bindings
