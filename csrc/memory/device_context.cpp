#include "memory/device_context.hpp"

#include "core/cuda_check.hpp"

namespace kvxfer {

DeviceContext::DeviceContext(int device) : device_(device) {
  KVXFER_DRIVER_CHECK(driver().init(0));
  CUcontext context = nullptr;
  KVXFER_DRIVER_CHECK(driver().device_primary_ctx_retain(&context, device));
  context_ = context;
}

DeviceContext::~DeviceContext() { (void)driver().device_primary_ctx_release(device_); }

void DeviceContext::enter() const {
  KVXFER_DRIVER_CHECK(driver().ctx_push_current(static_cast<CUcontext>(context_)));
}

void DeviceContext::leave() const {
  CUcontext left = nullptr;
  KVXFER_DRIVER_CHECK(driver().ctx_pop_current(&left));
}

}  // namespace kvxfer
