#pragma once

#include <cstdint>
#include <cstring>

#include "copy/copy_plan.hpp"

namespace kvxfer {

/// Conversions of elements to fp8 in plain arithmetic, the same code on hosts and GPUs and without
/// branches, so that compilers can vectorise it. The copy kernel has instructions for this; what
/// checks the kernel has not.

KVXFER_HOST_DEVICE inline float float_of_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

KVXFER_HOST_DEVICE inline std::uint32_t bits_of_float(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// In bits, since compilers take the branch of a conditional expression here, and then no vectors.
KVXFER_HOST_DEVICE inline std::uint32_t select(bool condition, std::uint32_t yes,
                                               std::uint32_t no) {
  return no ^ ((yes ^ no) & (0u - static_cast<std::uint32_t>(condition)));
}

KVXFER_HOST_DEVICE inline float bf16_to_float(std::uint16_t element) {
  return float_of_bits(static_cast<std::uint32_t>(element) << 16);
}

KVXFER_HOST_DEVICE inline float f16_to_float(std::uint16_t element) {
  constexpr std::uint32_t kRebias = 112u << 23;       // from a bias of 15 to one of 127
  constexpr std::uint32_t kOne = 1u << 23;            // of the exponent
  constexpr std::uint32_t kInfinity = 0x7c00u << 13;  // of fp16, before the new bias
  const std::uint32_t magnitude = (element & 0x7fffu) << 13;
  const std::uint32_t normal = magnitude + kRebias;
  // Below 2^-14 there is no leading one: give it one, and take its value off again.
  const std::uint32_t subnormal =
      bits_of_float(float_of_bits(normal + kOne) - float_of_bits(kRebias + kOne));
  const std::uint32_t finite = select(magnitude < (1u << 23), subnormal, normal);
  const std::uint32_t bits = select(magnitude >= kInfinity, normal + kRebias, finite);
  return float_of_bits(bits | (static_cast<std::uint32_t>(element & 0x8000u) << 16));
}

/// Rounds to e4m3 (OCP FP8 E4M3FN): to the nearest, ties to even; beyond +-448, infinities too, to
/// +-448; NaN of either sign to 0x7f. The bits of __nv_cvt_float_to_fp8 with saturation.
KVXFER_HOST_DEVICE inline std::uint8_t float_to_e4m3(float value) {
  constexpr std::uint32_t kMaximum = 0x43e00000;         // 448
  constexpr std::uint32_t kSmallestNormal = 0x3c800000;  // 2^-6
  constexpr std::uint32_t kRebias = (127 - 7) << 3;
  constexpr float kStep = 16384;  // floats from here on are 2^-9 apart, as subnormals of e4m3 are
  const std::uint32_t bits = bits_of_float(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t bounded = select(magnitude < kMaximum, magnitude, kMaximum);
  const std::uint32_t normal = ((bounded + 0x7ffffu + ((bounded >> 20) & 1u)) >> 20) - kRebias;
  const std::uint32_t subnormal =
      bits_of_float(float_of_bits(bounded) + kStep) - bits_of_float(kStep);
  const std::uint32_t finite =
      select(bounded < kSmallestNormal, subnormal, normal) | ((bits >> 24) & 0x80u);
  return static_cast<std::uint8_t>(select(magnitude > 0x7f800000u, 0x7fu, finite));
}

/// One element on its way: `element` has the two bytes of the source.
template <Conversion kConversion>
KVXFER_HOST_DEVICE std::uint8_t convert_element(std::uint16_t element, float inverse_scale) {
  static_assert(kConversion != Conversion::kNone);
  const float value =
      kConversion == Conversion::kBf16ToE4m3 ? bf16_to_float(element) : f16_to_float(element);
  return float_to_e4m3(value * inverse_scale);
}

/// Calls `visit.template operator()<C>()` with `conversion` as a constant.
template <class Visit>
auto with_conversion(Conversion conversion, Visit&& visit) {
  switch (conversion) {
    case Conversion::kBf16ToE4m3:
      return visit.template operator()<Conversion::kBf16ToE4m3>();
    case Conversion::kF16ToE4m3:
      return visit.template operator()<Conversion::kF16ToE4m3>();
    default:
      return visit.template operator()<Conversion::kNone>();
  }
}

/// Converts `num_elements` elements of two bytes on this CPU; neither address need be aligned.
void convert_run(Conversion conversion, void* dst, const void* src, std::uint64_t num_elements,
                 float inverse_scale);

}  // namespace kvxfer
