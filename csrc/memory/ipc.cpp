#include "memory/ipc.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/check.hpp"
#include "core/cuda_check.hpp"
#include "memory/device.hpp"

// Distribution headers older than the kernel call lack the names; the numbers are the same on every
// architecture (asm-generic/unistd.h).
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif

namespace kvxfer {

namespace {

constexpr std::size_t kMaxChunks = 65536;

/// A reference to a physical allocation of the virtual memory API.
class ChunkHandle {
 public:
  explicit ChunkHandle(CUmemGenericAllocationHandle handle) noexcept : handle_(handle) {}
  ~ChunkHandle() { (void)driver().mem_release(handle_); }
  ChunkHandle(const ChunkHandle&) = delete;
  ChunkHandle& operator=(const ChunkHandle&) = delete;
  [[nodiscard]] CUmemGenericAllocationHandle get() const noexcept { return handle_; }

 private:
  CUmemGenericAllocationHandle handle_;
};

struct ChunkRange {
  std::uint64_t base;
  std::uint64_t num_bytes;
};

ChunkRange chunk_range(std::uint64_t address) {
  CUdeviceptr base = 0;
  std::size_t num_bytes = 0;
  KVXFER_DRIVER_CHECK(driver().mem_get_address_range(&base, &num_bytes, address));
  // The base and size of the one mapping that holds `address`, where the driver tells them apart
  // from the reservation's.
  CUdeviceptr mapping_base = 0;
  std::size_t mapping_bytes = 0;
  if (driver().pointer_get_attribute(&mapping_base, CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
                                     address) == CUDA_SUCCESS &&
      driver().pointer_get_attribute(&mapping_bytes, CU_POINTER_ATTRIBUTE_MAPPING_SIZE, address) ==
          CUDA_SUCCESS &&
      mapping_base != 0 && mapping_bytes != 0) {
    return {mapping_base, mapping_bytes};
  }
  return {base, num_bytes};
}

UniqueFd export_chunk(std::uint64_t address) {
  CUmemGenericAllocationHandle raw{};
  const CUresult retained =
      driver().mem_retain_allocation_handle(&raw, reinterpret_cast<void*>(address));
  if (retained != CUDA_SUCCESS) {
    throw Error(ErrorKind::kRegistration,
                "device memory at " + std::to_string(address) +
                    " can be exported neither by a legacy IPC handle nor as virtual memory (" +
                    driver_error_text(retained) +
                    "); allocate the cache with cudaMalloc (for PyTorch: without "
                    "expandable_segments, and not from a stream-ordered pool)");
  }
  const ChunkHandle handle(raw);
  int fd = -1;
  const CUresult exported = driver().mem_export_to_shareable_handle(
      &fd, handle.get(), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (exported != CUDA_SUCCESS) {
    throw Error(ErrorKind::kRegistration,
                "virtual memory at " + std::to_string(address) +
                    " was created without a POSIX descriptor handle (" +
                    driver_error_text(exported) +
                    "); for PyTorch set TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1 or turn "
                    "expandable_segments off");
  }
  return UniqueFd(fd);
}

class LegacyMapping final : public IpcMapping {
 public:
  LegacyMapping(int device, const std::string& handle, std::uint64_t num_bytes) : device_(device) {
    KVXFER_REQUIRE(handle.size() == sizeof(cudaIpcMemHandle_t),
                   "an IPC handle of " + std::to_string(handle.size()) + " bytes; it has " +
                       std::to_string(sizeof(cudaIpcMemHandle_t)));
    cudaIpcMemHandle_t raw;
    std::memcpy(&raw, handle.data(), sizeof(raw));
    const DeviceGuard guard(device);
    void* data = nullptr;
    KVXFER_CUDA_CHECK(cudaIpcOpenMemHandle(&data, raw, cudaIpcMemLazyEnablePeerAccess));
    address_ = reinterpret_cast<std::uint64_t>(data);
    num_bytes_ = num_bytes;
  }
  ~LegacyMapping() override {
    int previous = 0;
    (void)cudaGetDevice(&previous);
    (void)cudaSetDevice(device_);
    (void)cudaIpcCloseMemHandle(reinterpret_cast<void*>(address_));
    (void)cudaSetDevice(previous);
  }

  void require_size() const {
    const PointerInfo found = pointer_info(address_);
    if (found.num_bytes < num_bytes_) {
      throw Error(ErrorKind::kRegistration,
                  "the peer's allocation has " + std::to_string(found.num_bytes) +
                      " bytes, the peer says " + std::to_string(num_bytes_));
    }
  }

 private:
  int device_;
};

UniqueFd take_fd(int pid, int fd) {
  const UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!process.valid()) {
    throw_errno(ErrorKind::kPeerLost, "pidfd_open of process " + std::to_string(pid), errno);
  }
  UniqueFd copy(static_cast<int>(::syscall(SYS_pidfd_getfd, process.get(), fd, 0)));
  if (!copy.valid()) {
    throw_errno(ErrorKind::kNotAvailable,
                "taking descriptor " + std::to_string(fd) + " of process " + std::to_string(pid) +
                    " (pidfd_getfd needs Linux 5.6 and the right to trace it; else allocate the "
                    "cache with cudaMalloc)",
                errno);
  }
  return copy;
}

/// Reserved addresses with any number of chunks mapped from their start on.
class ChunkMapping final : public IpcMapping {
 public:
  explicit ChunkMapping(std::uint64_t num_bytes) {
    CUdeviceptr base = 0;
    KVXFER_DRIVER_CHECK(driver().mem_address_reserve(&base, num_bytes, 0, 0, 0));
    address_ = base;
    num_bytes_ = num_bytes;
  }
  ~ChunkMapping() override {
    if (mapped_bytes_ != 0) (void)driver().mem_unmap(address_, mapped_bytes_);
    (void)driver().mem_address_free(address_, num_bytes_);
  }

  void append(int fd, std::uint64_t chunk_bytes) {
    CUmemGenericAllocationHandle raw{};
    KVXFER_DRIVER_CHECK(driver().mem_import_from_shareable_handle(
        &raw, reinterpret_cast<void*>(static_cast<std::uintptr_t>(fd)),
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    const ChunkHandle handle(raw);  // the mapping keeps the memory alive by itself
    KVXFER_DRIVER_CHECK(
        driver().mem_map(address_ + mapped_bytes_, chunk_bytes, 0, handle.get(), 0));
    mapped_bytes_ += chunk_bytes;
  }

  void allow(int device) const {
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    KVXFER_DRIVER_CHECK(driver().mem_set_access(address_, num_bytes_, &access, 1));
  }

 private:
  std::uint64_t mapped_bytes_ = 0;
};

}  // namespace

IpcExport::IpcExport(std::uint64_t address, std::uint64_t num_bytes) {
  const PointerInfo info = pointer_info(address);
  device_ = info.device;
  buffer_id_ = info.buffer_id;
  const DeviceGuard guard(device_);
  if (info.legacy_ipc) {
    if (address - info.base + num_bytes > info.num_bytes) {
      throw Error(ErrorKind::kRegistration, std::to_string(num_bytes) + " bytes at offset " +
                                                std::to_string(address - info.base) +
                                                " pass the end of an allocation of " +
                                                std::to_string(info.num_bytes) + " bytes");
    }
    offset_bytes_ = address - info.base;
    chunk_bytes_.push_back(info.num_bytes);
    export_legacy(info.base);
  } else {
    export_chunks(address, num_bytes);
  }
}

void IpcExport::export_legacy(std::uint64_t base) {
  cudaIpcMemHandle_t handle;
  KVXFER_CUDA_CHECK(cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(base)));
  legacy_handle_.assign(reinterpret_cast<const char*>(&handle), sizeof(handle));
}

void IpcExport::export_chunks(std::uint64_t address, std::uint64_t num_bytes) {
  ChunkRange chunk = chunk_range(address);
  offset_bytes_ = address - chunk.base;
  const std::uint64_t end = address + num_bytes;
  for (std::uint64_t at = chunk.base; at < end; at += chunk.num_bytes) {
    (void)pointer_info(at);  // a hole in the reservation is reported as dead memory
    chunk = chunk_range(at);
    if (chunk.base != at || chunk_fds_.size() == kMaxChunks) {
      throw Error(ErrorKind::kRegistration,
                  "virtual memory at " + std::to_string(at) + " is not a row of whole chunks");
    }
    chunk_fds_.push_back(export_chunk(at));
    chunk_bytes_.push_back(chunk.num_bytes);
  }
}

std::vector<int> IpcExport::chunk_fds() const {
  std::vector<int> fds;
  fds.reserve(chunk_fds_.size());
  for (const auto& fd : chunk_fds_) fds.push_back(fd.get());
  return fds;
}

std::unique_ptr<IpcMapping> IpcMapping::open_legacy(int device, const std::string& handle,
                                                    std::uint64_t num_bytes) {
  auto mapping = std::make_unique<LegacyMapping>(device, handle, num_bytes);
  mapping->require_size();
  return mapping;
}

std::unique_ptr<IpcMapping> IpcMapping::open_chunks(int device, int pid,
                                                    const std::vector<int>& fds,
                                                    const std::vector<std::uint64_t>& chunk_bytes) {
  KVXFER_REQUIRE(!fds.empty() && fds.size() == chunk_bytes.size() && fds.size() <= kMaxChunks,
                 std::to_string(fds.size()) + " descriptors for " +
                     std::to_string(chunk_bytes.size()) + " chunks; send one a chunk");
  std::uint64_t total_bytes = 0;
  for (const std::uint64_t num_bytes : chunk_bytes) {
    KVXFER_REQUIRE(num_bytes > 0 && num_bytes < (1ull << 46) - total_bytes,
                   "a chunk of " + std::to_string(num_bytes) + " bytes is out of range");
    total_bytes += num_bytes;
  }
  const DeviceGuard guard(device);
  auto mapping = std::make_unique<ChunkMapping>(total_bytes);
  for (std::size_t index = 0; index < fds.size(); ++index) {
    const UniqueFd fd = take_fd(pid, fds[index]);
    mapping->append(fd.get(), chunk_bytes[index]);
  }
  mapping->allow(device);
  return mapping;
}

}  // namespace kvxfer
