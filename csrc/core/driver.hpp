#pragma once

// Included by CUDA sources only.
#include <cuda.h>

#include <string>

namespace kvxfer {

/// The driver functions that the runtime has no twin for, found in libcuda.so.1 when first needed:
/// nothing links it, so one build imports on a machine without a driver too.
struct Driver {
  decltype(&::cuInit) init;
  decltype(&::cuDevicePrimaryCtxRetain) device_primary_ctx_retain;
  decltype(&::cuDevicePrimaryCtxRelease_v2) device_primary_ctx_release;
  decltype(&::cuCtxPushCurrent_v2) ctx_push_current;
  decltype(&::cuCtxPopCurrent_v2) ctx_pop_current;
  decltype(&::cuGetErrorString) get_error_string;
  decltype(&::cuPointerGetAttribute) pointer_get_attribute;
  decltype(&::cuMemGetAddressRange_v2) mem_get_address_range;
  decltype(&::cuMemRetainAllocationHandle) mem_retain_allocation_handle;
  decltype(&::cuMemExportToShareableHandle) mem_export_to_shareable_handle;
  decltype(&::cuMemImportFromShareableHandle) mem_import_from_shareable_handle;
  decltype(&::cuMemAddressReserve) mem_address_reserve;
  decltype(&::cuMemAddressFree) mem_address_free;
  decltype(&::cuMemMap) mem_map;
  decltype(&::cuMemUnmap) mem_unmap;
  decltype(&::cuMemSetAccess) mem_set_access;
  decltype(&::cuMemRelease) mem_release;
};

/// Throws Error(kNotAvailable) where libcuda.so.1 or one of the functions is missing.
const Driver& driver();
std::string driver_error_text(CUresult status);

}  // namespace kvxfer
