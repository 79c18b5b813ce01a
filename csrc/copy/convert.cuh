#pragma once

// Elements of 16 bits to fp8 (e4m3) by the GPU's own instructions; fp8.hpp is the same on a host.

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "copy/copy_plan.hpp"

namespace kvxfer {

template <Conversion kConversion>
__device__ __forceinline__ float to_float(std::uint32_t bits) {
  if constexpr (kConversion == Conversion::kBf16ToE4m3) {
    return __uint_as_float(bits << 16);
  } else {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
}

/// Two elements of 16 bits to two of fp8: round to nearest even, saturate.
template <Conversion kConversion>
__device__ __forceinline__ std::uint32_t convert_pair(std::uint32_t pair, float inverse_scale) {
  const float2 values{to_float<kConversion>(pair & 0xffffu) * inverse_scale,
                      to_float<kConversion>(pair >> 16) * inverse_scale};
  return __nv_cvt_float2_to_fp8x2(values, __NV_SATFINITE, __NV_E4M3);
}

template <Conversion kConversion>
__device__ __forceinline__ std::uint32_t convert_four(std::uint32_t low, std::uint32_t high,
                                                      float inverse_scale) {
  return convert_pair<kConversion>(low, inverse_scale) |
         convert_pair<kConversion>(high, inverse_scale) << 16;
}

}  // namespace kvxfer
