#include "copy/fp8.hpp"

// Wheels are built for any x86-64, whose vectors are half as fast here: the loader picks the
// variant that the machine has.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define KVXFER_VARIANTS __attribute__((target_clones("avx2", "default")))
#else
#define KVXFER_VARIANTS
#endif

namespace kvxfer {

namespace {

template <Conversion kConversion>
inline void convert_elements(std::uint8_t* dst, const char* src, std::uint64_t num_elements,
                             float inverse_scale) {
  for (std::uint64_t index = 0; index < num_elements; ++index) {
    std::uint16_t element;
    std::memcpy(&element, src + 2 * index, sizeof(element));
    dst[index] = convert_element<kConversion>(element, inverse_scale);
  }
}

KVXFER_VARIANTS void convert_bf16(std::uint8_t* dst, const char* src, std::uint64_t num_elements,
                                  float inverse_scale) {
  convert_elements<Conversion::kBf16ToE4m3>(dst, src, num_elements, inverse_scale);
}

KVXFER_VARIANTS void convert_f16(std::uint8_t* dst, const char* src, std::uint64_t num_elements,
                                 float inverse_scale) {
  convert_elements<Conversion::kF16ToE4m3>(dst, src, num_elements, inverse_scale);
}

}  // namespace

void convert_run(Conversion conversion, void* dst, const void* src, std::uint64_t num_elements,
                 float inverse_scale) {
  const auto convert = conversion == Conversion::kBf16ToE4m3 ? convert_bf16 : convert_f16;
  convert(static_cast<std::uint8_t*>(dst), static_cast<const char*>(src), num_elements,
          inverse_scale);
}

}  // namespace kvxfer
