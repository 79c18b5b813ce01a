#pragma once

#include <ucp/api/ucp.h>
#include <ucs/debug/log_def.h>

#include <string>
#include <vector>

#include "core/error.hpp"

// What is used of UCX. Nothing links it: the members below are looked up when it is opened.
#define KVXFER_UCX_FUNCTIONS(USE)     \
  USE(ucp_get_version)                \
  USE(ucp_get_version_string)         \
  USE(ucp_config_read)                \
  USE(ucp_config_modify)              \
  USE(ucp_config_print)               \
  USE(ucp_config_release)             \
  USE(ucp_init_version)               \
  USE(ucp_cleanup)                    \
  USE(ucp_context_query)              \
  USE(ucp_mem_map)                    \
  USE(ucp_mem_unmap)                  \
  USE(ucp_worker_create)              \
  USE(ucp_worker_destroy)             \
  USE(ucp_worker_progress)            \
  USE(ucp_worker_get_efd)             \
  USE(ucp_worker_arm)                 \
  USE(ucp_worker_signal)              \
  USE(ucp_worker_set_am_recv_handler) \
  USE(ucp_listener_create)            \
  USE(ucp_listener_query)             \
  USE(ucp_listener_reject)            \
  USE(ucp_listener_destroy)           \
  USE(ucp_ep_create)                  \
  USE(ucp_ep_query)                   \
  USE(ucp_ep_close_nbx)               \
  USE(ucp_am_send_nbx)                \
  USE(ucp_am_recv_data_nbx)           \
  USE(ucp_am_data_release)            \
  USE(ucp_request_free)               \
  USE(ucs_status_string)              \
  USE(ucs_log_push_handler)

namespace kvxfer::ucx {

/// UCX as it was opened at run time.
struct Library {
  void* handle = nullptr;
  std::string path;
#define KVXFER_UCX_MEMBER(name) decltype(&::name) name = nullptr;
  KVXFER_UCX_FUNCTIONS(KVXFER_UCX_MEMBER)
#undef KVXFER_UCX_MEMBER
};

/// Opens the first of `candidates` (names or paths of libucp) that fits the headers this was built
/// with, once a process. Throws Error(kNotAvailable) with the reason of each.
const Library& open_library(const std::vector<std::string>& candidates);

/// The library that was opened. Throws Error(kNotAvailable) before that.
const Library& library();

/// What UCX last logged in this thread as an error or a warning; empty after it was asked for. UCX
/// would print it to the standard output otherwise.
std::string take_log();

/// Throws what `status` means to a caller, unless it is UCS_OK. `what` names the attempt.
void check(ucs_status_t status, const std::string& what);
/// The kind of error that `status` is.
ErrorKind kind_of(ucs_status_t status);
/// "`what`: the status in words (what UCX logged)".
std::string describe(ucs_status_t status, const std::string& what);

}  // namespace kvxfer::ucx
