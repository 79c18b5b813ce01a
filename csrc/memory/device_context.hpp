#pragma once

namespace kvxfer {

/// The primary context of a GPU, which a thread has as its current one between enter() and leave():
/// libraries that ask the driver for the current context (UCX, and NIXL by it) find none in a
/// thread that has not used the GPU, and then offer no path to its memory. Calls nest, and leave()
/// gives back whatever was current before. May be used by several threads.
class DeviceContext {
 public:
  explicit DeviceContext(int device);
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  void enter() const;
  void leave() const;

 private:
  int device_;
  void* context_ = nullptr;  // a CUcontext
};

}  // namespace kvxfer
