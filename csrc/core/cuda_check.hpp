#pragma once

// Included by CUDA sources only.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>

#include "core/driver.hpp"
#include "core/error.hpp"

namespace kvxfer {

inline void check_cuda(cudaError_t status, const char* expression, const char* file, int line) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // a recoverable error must not surface again at the next call
  throw Error(ErrorKind::kCuda,
              std::string(expression) + " failed: " + cudaGetErrorString(status) + " (" + file +
                  ":" + std::to_string(line) + ")",
              static_cast<int>(status));
}

inline void check_driver(CUresult status, const char* expression, const char* file, int line) {
  if (status == CUDA_SUCCESS) return;
  throw Error(ErrorKind::kCuda,
              std::string(expression) + " failed: " + driver_error_text(status) + " (" + file +
                  ":" + std::to_string(line) + ")",
              static_cast<int>(status));
}

/// Makes `device` current for a scope, and the caller's device again after it.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice", __FILE__, __LINE__);
    changed_ = previous_ != device;
    if (changed_) check_cuda(cudaSetDevice(device), "cudaSetDevice", __FILE__, __LINE__);
  }
  ~DeviceGuard() {
    if (changed_) (void)cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace kvxfer

#define KVXFER_CUDA_CHECK(expression) \
  ::kvxfer::check_cuda((expression), #expression, __FILE__, __LINE__)
#define KVXFER_DRIVER_CHECK(expression) \
  ::kvxfer::check_driver((expression), #expression, __FILE__, __LINE__)
