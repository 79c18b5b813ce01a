#include "core/driver.hpp"

#include <dlfcn.h>

#include "core/error.hpp"

namespace kvxfer {

namespace {

template <typename Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr) {
    throw Error(ErrorKind::kNotAvailable,
                std::string("libcuda.so.1 has no ") + name + "; update the NVIDIA driver");
  }
}

Driver load() {
  // Never closed: the driver lives as long as the process.
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Error(ErrorKind::kNotAvailable, "libcuda.so.1 is not here: no NVIDIA driver");
  }
  Driver table{};
  find(library, "cuInit", table.init);
  find(library, "cuDevicePrimaryCtxRetain", table.device_primary_ctx_retain);
  find(library, "cuDevicePrimaryCtxRelease_v2", table.device_primary_ctx_release);
  find(library, "cuCtxPushCurrent_v2", table.ctx_push_current);
  find(library, "cuCtxPopCurrent_v2", table.ctx_pop_current);
  find(library, "cuGetErrorString", table.get_error_string);
  find(library, "cuPointerGetAttribute", table.pointer_get_attribute);
  find(library, "cuMemGetAddressRange_v2", table.mem_get_address_range);
  find(library, "cuMemRetainAllocationHandle", table.mem_retain_allocation_handle);
  find(library, "cuMemExportToShareableHandle", table.mem_export_to_shareable_handle);
  find(library, "cuMemImportFromShareableHandle", table.mem_import_from_shareable_handle);
  find(library, "cuMemAddressReserve", table.mem_address_reserve);
  find(library, "cuMemAddressFree", table.mem_address_free);
  find(library, "cuMemMap", table.mem_map);
  find(library, "cuMemUnmap", table.mem_unmap);
  find(library, "cuMemSetAccess", table.mem_set_access);
  find(library, "cuMemRelease", table.mem_release);
  return table;
}

}  // namespace

const Driver& driver() {
  static const Driver table = load();
  return table;
}

std::string driver_error_text(CUresult status) {
  const char* text = nullptr;
  if (driver().get_error_string(status, &text) != CUDA_SUCCESS || text == nullptr) {
    return "status " + std::to_string(static_cast<int>(status));
  }
  return text;
}

}  // namespace kvxfer
