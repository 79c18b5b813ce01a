#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/unique_fd.hpp"

namespace kvxfer {

/// A device address range made openable for other processes of this host. A handle stands for a
/// whole allocation, so the range travels as allocation + offset. Memory from cudaMalloc goes by a
/// legacy IPC handle; memory mapped by the virtual memory API (PyTorch's expandable segments) is a
/// row of chunks, each with a file descriptor that this object keeps open.
class IpcExport {
 public:
  /// Throws Error(kRegistration) where the memory is dead, shorter than `num_bytes`, or was created
  /// without a handle type that can be exported.
  IpcExport(std::uint64_t address, std::uint64_t num_bytes);

  [[nodiscard]] int device() const noexcept { return device_; }
  [[nodiscard]] std::uint64_t buffer_id() const noexcept { return buffer_id_; }
  [[nodiscard]] std::uint64_t offset_bytes() const noexcept { return offset_bytes_; }
  /// 64 bytes for legacy memory, empty for VMM memory.
  [[nodiscard]] const std::string& legacy_handle() const noexcept { return legacy_handle_; }
  [[nodiscard]] std::vector<int> chunk_fds() const;
  [[nodiscard]] const std::vector<std::uint64_t>& chunk_bytes() const noexcept {
    return chunk_bytes_;
  }

 private:
  void export_legacy(std::uint64_t address);
  void export_chunks(std::uint64_t address, std::uint64_t num_bytes);

  int device_ = -1;
  std::uint64_t buffer_id_ = 0;
  std::uint64_t offset_bytes_ = 0;
  std::string legacy_handle_;
  std::vector<UniqueFd> chunk_fds_;
  std::vector<std::uint64_t> chunk_bytes_;
};

/// A peer's allocation mapped for kernels and copies of one of this process's devices.
class IpcMapping {
 public:
  /// `handle` is what IpcExport::legacy_handle() gave; `num_bytes` is the allocation's size,
  /// checked against what the driver says.
  static std::unique_ptr<IpcMapping> open_legacy(int device, const std::string& handle,
                                                 std::uint64_t num_bytes);
  /// Duplicates the chunks' descriptors out of process `pid` (pidfd_getfd) and maps them in a row.
  static std::unique_ptr<IpcMapping> open_chunks(int device, int pid, const std::vector<int>& fds,
                                                 const std::vector<std::uint64_t>& chunk_bytes);
  virtual ~IpcMapping() = default;

  [[nodiscard]] std::uint64_t address() const noexcept { return address_; }
  [[nodiscard]] std::uint64_t num_bytes() const noexcept { return num_bytes_; }

 protected:
  IpcMapping() = default;
  std::uint64_t address_ = 0;
  std::uint64_t num_bytes_ = 0;
};

}  // namespace kvxfer
