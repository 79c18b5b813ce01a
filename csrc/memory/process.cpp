#include "memory/process.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <sstream>
#include <string>
#include <system_error>

#include "core/error.hpp"
#include "core/unique_fd.hpp"

namespace kvxfer {

namespace {

[[noreturn]] void throw_unread(const std::string& folder) {
  const int code = errno;
  const std::string process = "process " + folder.substr(6);
  if (code == ENOENT || code == ESRCH) {
    throw Error(ErrorKind::kPeerLost, "there is no " + process);
  }
  // Above all no free descriptor: it says nothing about the process, whose pages must stay its own.
  throw Error(ErrorKind::kNotAvailable, "cannot tell whether " + process + " lives: " + folder +
                                            "/stat: " + std::generic_category().message(code));
}

std::string read_stat(const std::string& folder) {
  const UniqueFd file(::open((folder + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.valid()) throw_unread(folder);
  std::string text(4096, '\0');  // a name of 64 bytes and 51 numbers at the most
  const ssize_t size = ::read(file.get(), text.data(), text.size());
  if (size < 0) throw_unread(folder);
  text.resize(static_cast<std::size_t>(size));
  return text;
}

std::uint64_t start_ticks(const std::string& folder) {
  const std::string text = read_stat(folder);
  // The second field is the program's name in brackets and may itself hold spaces and brackets.
  const auto bracket = text.rfind(')');
  if (bracket == std::string::npos) {
    throw Error(ErrorKind::kPeerLost, "there is no process " + folder.substr(6));
  }
  std::istringstream fields(text.substr(bracket + 1));
  std::string skipped;
  char state = 0;
  fields >> state;
  // Killed but not yet reaped by its parent: its number still stands, its memory does not.
  if (state == 'Z' || state == 'X') {
    throw Error(ErrorKind::kPeerLost, "process " + folder.substr(6) + " has ended");
  }
  for (int field = 4; field < 22; ++field) fields >> skipped;
  std::uint64_t ticks = 0;
  fields >> ticks;
  return ticks;
}

std::uint64_t pid_namespace(const std::string& folder) {
  struct stat status{};
  // Another user's namespace cannot be read; 0 then differs from every real inode.
  return ::stat((folder + "/ns/pid").c_str(), &status) == 0 ? status.st_ino : 0;
}

ProcessIdentity read_identity(int pid) {
  const std::string folder = "/proc/" + std::to_string(pid);
  return {pid, start_ticks(folder), pid_namespace(folder)};
}

/// The caller's own, read once a process, so that it takes no descriptor later. The number is
/// written last: where it is this process's, the others are too, also after a fork.
ProcessIdentity own_identity() {
  static std::atomic<int> number{0};
  static std::atomic<std::uint64_t> ticks{0};
  static std::atomic<std::uint64_t> space{0};
  const int pid = static_cast<int>(::getpid());
  if (number.load() != pid) {
    const ProcessIdentity found = read_identity(pid);
    ticks.store(found.start_ticks);
    space.store(found.pid_namespace);
    number.store(pid);
  }
  return {pid, ticks.load(), space.load()};
}

}  // namespace

ProcessIdentity process_identity(int pid) { return pid == 0 ? own_identity() : read_identity(pid); }

void require_same_process(const ProcessIdentity& expected) {
  if (own_identity().pid_namespace != expected.pid_namespace) {
    throw Error(ErrorKind::kNotAvailable,
                "process " + std::to_string(expected.pid) +
                    " lives in another pid namespace; share it (for containers: --pid) or use a "
                    "network transport");
  }
  const ProcessIdentity found = process_identity(expected.pid);
  if (found.start_ticks != expected.start_ticks) {
    throw Error(ErrorKind::kPeerLost, "process " + std::to_string(expected.pid) +
                                          " is not the one that was met: its id was reused");
  }
}

}  // namespace kvxfer
