#include "memory/process.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>

#include "core/error.hpp"

namespace kvxfer {

namespace {

std::uint64_t start_ticks(const std::string& folder) {
  std::ifstream file(folder + "/stat");
  std::string text;
  std::getline(file, text);
  // The second field is the program's name in brackets and may itself hold spaces and brackets.
  const auto bracket = text.rfind(')');
  if (!file || bracket == std::string::npos) {
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

}  // namespace

ProcessIdentity process_identity(int pid) {
  const int wanted = pid == 0 ? static_cast<int>(::getpid()) : pid;
  const std::string folder = "/proc/" + std::to_string(wanted);
  return {wanted, start_ticks(folder), pid_namespace(folder)};
}

void require_same_process(const ProcessIdentity& expected) {
  if (process_identity(0).pid_namespace != expected.pid_namespace) {
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
