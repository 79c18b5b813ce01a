#pragma once

#include <cstdint>
#include <string>

namespace kvxfer {

/// One GPU as the CUDA runtime describes it. `index` counts the devices visible to this process.
struct DeviceInfo {
  int index;
  std::string name;
  std::string uuid;        ///< "GPU-xxxxxxxx-xxxx-...", the same in every process
  std::string pci_bus_id;  ///< "0000:19:00.0"
  int compute_major;
  int compute_minor;
  int num_sms;
  std::uint64_t memory_bytes;
  double memory_gb_per_s;  ///< peak of the memory bus, from its clock and width; 0 if unknown
};

/// Number of usable GPUs; 0 where there is no driver or the build has no CUDA.
int device_count();
/// Why device_count() is 0; empty where it is not.
std::string no_device_reason();
DeviceInfo device_info(int device);
bool can_access_peer(int from_device, int to_device);
/// Lets kernels and copies of `from_device` reach the memory of `to_device` in this process, for as
/// long as it lives; again is no error.
void enable_peer_access(int from_device, int to_device);

/// The allocation that a device address belongs to.
struct PointerInfo {
  int device;
  std::uint64_t base;
  std::uint64_t num_bytes;
  std::uint64_t buffer_id;  ///< unique per allocation for the life of the process
  bool legacy_ipc;          ///< cudaIpcGetMemHandle can export it
};

/// Throws Error(kRegistration) where `address` is not live device memory.
PointerInfo pointer_info(std::uint64_t address);

/// PointerInfo::buffer_id alone, for checks on the way of a transfer.
std::uint64_t buffer_id(std::uint64_t address);

/// Device memory from cudaMalloc, freed at the end of its life.
class DeviceBuffer {
 public:
  DeviceBuffer(int device, std::uint64_t num_bytes);
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  [[nodiscard]] int device() const noexcept { return device_; }
  [[nodiscard]] std::uint64_t address() const noexcept { return address_; }
  [[nodiscard]] std::uint64_t num_bytes() const noexcept { return num_bytes_; }
  /// Copies num_bytes() bytes of host memory here; any stream sees them once this returns.
  void fill_from(const void* bytes);

 private:
  int device_;
  std::uint64_t num_bytes_;
  std::uint64_t address_ = 0;
};

/// Host memory of the caller's, page-locked so that copy engines reach it directly, and pageable
/// again at the end of its life. The caller keeps it mapped until then.
class PinnedRange {
 public:
  PinnedRange(std::uint64_t address, std::uint64_t num_bytes);
  ~PinnedRange();
  PinnedRange(const PinnedRange&) = delete;
  PinnedRange& operator=(const PinnedRange&) = delete;

 private:
  std::uint64_t address_;
};

}  // namespace kvxfer
