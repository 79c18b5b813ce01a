#include "ucx/library.hpp"

#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <utility>

namespace kvxfer::ucx {

namespace {

// Older ones lack the transports of an endpoint and memory handles in requests.
constexpr unsigned kMinMinor = 15;

std::mutex g_mutex;
Library g_library;
thread_local std::string t_log;

ucs_log_func_rc_t keep_log(const char*, unsigned, const char*, ucs_log_level_t level,
                           const ucs_log_component_config_t*, const char* message, va_list args) {
  if (level != UCS_LOG_LEVEL_ERROR && level != UCS_LOG_LEVEL_WARN) return UCS_LOG_FUNC_RC_CONTINUE;
  char text[256];
  if (std::vsnprintf(text, sizeof(text), message, args) > 0) t_log = text;
  return UCS_LOG_FUNC_RC_STOP;
}

/// Why the opened library cannot be used; empty where it can.
std::string unfit(Library& opened) {
#define KVXFER_UCX_LOOK_UP(name)                                                        \
  opened.name = reinterpret_cast<decltype(opened.name)>(::dlsym(opened.handle, #name)); \
  if (opened.name == nullptr) return "it has no " #name;
  KVXFER_UCX_FUNCTIONS(KVXFER_UCX_LOOK_UP)
#undef KVXFER_UCX_LOOK_UP
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  opened.ucp_get_version(&major, &minor, &release);
  if (major == UCP_API_MAJOR && minor >= kMinMinor) return "";
  return "it is UCX " + std::to_string(major) + "." + std::to_string(minor) + "; use " +
         std::to_string(UCP_API_MAJOR) + "." + std::to_string(kMinMinor) + " or later";
}

/// Opens `name` into `opened`; returns why not, or nothing.
std::string open_one(const std::string& name, Library& opened) {
  opened.handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  opened.path = name;
  if (opened.handle == nullptr) return ::dlerror();
  std::string reason = unfit(opened);
  if (reason.empty()) return reason;
  ::dlclose(opened.handle);
  // What stays mapped would lend its parts to the next candidate.
  if (void* left = ::dlopen("libucs.so.0", RTLD_NOW | RTLD_NOLOAD)) {
    ::dlclose(left);
    throw Error(ErrorKind::kNotAvailable, name + ": " + reason);
  }
  return name + ": " + reason;
}

}  // namespace

const Library& open_library(const std::vector<std::string>& candidates) {
  const std::lock_guard lock(g_mutex);
  if (g_library.handle != nullptr) return g_library;
  std::string reasons;
  for (const std::string& name : candidates) {
    Library opened;
    const std::string reason = open_one(name, opened);
    if (reason.empty()) {
      opened.ucs_log_push_handler(&keep_log);
      g_library = std::move(opened);
      return g_library;
    }
    reasons += (reasons.empty() ? "" : "; ") + reason;
  }
  throw Error(ErrorKind::kNotAvailable, reasons);
}

const Library& library() {
  const std::lock_guard lock(g_mutex);
  if (g_library.handle == nullptr) throw Error(ErrorKind::kNotAvailable, "UCX was not opened");
  return g_library;
}

std::string take_log() { return std::exchange(t_log, {}); }

ErrorKind kind_of(ucs_status_t status) {
  switch (status) {
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_ENDPOINT_TIMEOUT:
    case UCS_ERR_NOT_CONNECTED:
    case UCS_ERR_UNREACHABLE:
    case UCS_ERR_REJECTED:
    case UCS_ERR_CANCELED:
      return ErrorKind::kPeerLost;
    case UCS_ERR_TIMED_OUT:
      return ErrorKind::kTransferTimeout;
    case UCS_ERR_NO_DEVICE:
    case UCS_ERR_UNSUPPORTED:
      return ErrorKind::kNotAvailable;
    default:
      return ErrorKind::kTransferFailed;
  }
}

std::string describe(ucs_status_t status, const std::string& what) {
  const std::string log = take_log();
  return what + ": " + library().ucs_status_string(status) + (log.empty() ? "" : " (" + log + ")");
}

void check(ucs_status_t status, const std::string& what) {
  if (status != UCS_OK) throw Error(kind_of(status), describe(status, what), status);
}

}  // namespace kvxfer::ucx
