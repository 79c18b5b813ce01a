#include "memory/device.hpp"

#include <cstdio>
#include <string>

#include "core/cuda_check.hpp"

namespace kvxfer {

namespace {

std::string format_uuid(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (int index = 0; index < 16; ++index) {
    if (index == 4 || index == 6 || index == 8 || index == 10) text += '-';
    char pair[3];
    std::snprintf(pair, sizeof(pair), "%02x", static_cast<unsigned char>(uuid.bytes[index]));
    text += pair;
  }
  return text;
}

template <typename Value>
Value pointer_attribute(CUpointer_attribute attribute, std::uint64_t address) {
  Value value{};
  const CUresult status = driver().pointer_get_attribute(&value, attribute, address);
  if (status == CUDA_ERROR_INVALID_VALUE) {
    throw Error(ErrorKind::kRegistration,
                "address " + std::to_string(address) +
                    " is not live device memory: it was freed, or never came from CUDA");
  }
  KVXFER_DRIVER_CHECK(status);
  return value;
}

}  // namespace

int device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

std::string no_device_reason() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaErrorInsufficientDriver) {
    return "no NVIDIA driver, or one older than CUDA " + std::to_string(CUDART_VERSION / 1000) +
           " needs; install or update it";
  }
  if (status != cudaSuccess) return cudaGetErrorString(status);
  return count == 0 ? "no GPU is visible to this process" : "";
}

DeviceInfo device_info(int device) {
  cudaDeviceProp properties{};
  KVXFER_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  char bus_id[32] = {};
  KVXFER_CUDA_CHECK(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), device));
  int memory_khz = 0;
  KVXFER_CUDA_CHECK(cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, device));
  // Two transfers a clock on every DDR-type memory.
  const double memory_gb_per_s = 2.0 * memory_khz * 1e3 * properties.memoryBusWidth / 8 / 1e9;
  return {
      device,           properties.name,  format_uuid(properties.uuid),   bus_id,
      properties.major, properties.minor, properties.multiProcessorCount, properties.totalGlobalMem,
      memory_gb_per_s};
}

bool can_access_peer(int from_device, int to_device) {
  if (from_device == to_device) return true;
  int answer = 0;
  KVXFER_CUDA_CHECK(cudaDeviceCanAccessPeer(&answer, from_device, to_device));
  return answer != 0;
}

void enable_peer_access(int from_device, int to_device) {
  if (from_device == to_device) return;
  const DeviceGuard guard(from_device);
  const cudaError_t status = cudaDeviceEnablePeerAccess(to_device, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();
    return;
  }
  KVXFER_CUDA_CHECK(status);
}

PointerInfo pointer_info(std::uint64_t address) {
  const auto type = pointer_attribute<unsigned int>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address);
  if (type != CU_MEMORYTYPE_DEVICE) {
    throw Error(ErrorKind::kRegistration, "address " + std::to_string(address) +
                                              " is not device memory (CUDA memory type " +
                                              std::to_string(type) + ")");
  }
  PointerInfo info{};
  info.device = pointer_attribute<int>(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address);
  info.base = pointer_attribute<CUdeviceptr>(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address);
  info.num_bytes = pointer_attribute<std::size_t>(CU_POINTER_ATTRIBUTE_RANGE_SIZE, address);
  info.buffer_id = pointer_attribute<unsigned long long>(CU_POINTER_ATTRIBUTE_BUFFER_ID, address);
  info.legacy_ipc =
      pointer_attribute<int>(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address) != 0;
  return info;
}

std::uint64_t buffer_id(std::uint64_t address) {
  return pointer_attribute<unsigned long long>(CU_POINTER_ATTRIBUTE_BUFFER_ID, address);
}

DeviceBuffer::DeviceBuffer(int device, std::uint64_t num_bytes)
    : device_(device), num_bytes_(num_bytes) {
  const DeviceGuard guard(device);
  void* data = nullptr;
  KVXFER_CUDA_CHECK(cudaMalloc(&data, num_bytes));
  address_ = reinterpret_cast<std::uint64_t>(data);
}

DeviceBuffer::~DeviceBuffer() { (void)cudaFree(reinterpret_cast<void*>(address_)); }

void DeviceBuffer::fill_from(const void* bytes) {
  const DeviceGuard guard(device_);
  KVXFER_CUDA_CHECK(
      cudaMemcpy(reinterpret_cast<void*>(address_), bytes, num_bytes_, cudaMemcpyHostToDevice));
  // From pageable memory the call may return before the bytes are there.
  KVXFER_CUDA_CHECK(cudaStreamSynchronize(nullptr));
}

PinnedRange::PinnedRange(std::uint64_t address, std::uint64_t num_bytes) : address_(address) {
  KVXFER_CUDA_CHECK(
      cudaHostRegister(reinterpret_cast<void*>(address), num_bytes, cudaHostRegisterPortable));
}

PinnedRange::~PinnedRange() { (void)cudaHostUnregister(reinterpret_cast<void*>(address_)); }

}  // namespace kvxfer
