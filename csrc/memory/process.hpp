#pragma once

#include <cstdint>

namespace kvxfer {

/// What tells one process from any other on this host, past and present: ids are reused, so neither
/// the pid alone nor the pid with its namespace will do.
struct ProcessIdentity {
  int pid;
  std::uint64_t start_ticks;    ///< field 22 of /proc/PID/stat: clock ticks after boot
  std::uint64_t pid_namespace;  ///< inode of /proc/PID/ns/pid
};

/// The identity of process `pid`, or of the caller for 0. Throws Error(kPeerLost) where it is gone,
/// and Error(kNotAvailable) where that cannot be told, as without a free file descriptor.
ProcessIdentity process_identity(int pid);

/// Throws Error(kPeerLost) where `expected` has ended, and Error(kNotAvailable) where that cannot
/// be told: in another pid namespace, or without a free file descriptor.
void require_same_process(const ProcessIdentity& expected);

}  // namespace kvxfer
