#include <cuda_runtime.h>

#include <algorithm>

#include "copy/device_copier.hpp"
#include "core/cuda_check.hpp"

namespace kvxfer {

namespace {

constexpr int kThreads = 256;
constexpr std::uint64_t kMaxBlocks = 4096;

/// Calls visit(address, key, word, inverse_scale's index) for this thread's words of a page, which
/// neighbouring threads take in the order of memory. The blocks of one column of the grid share a
/// page, which has fewer than 2^32 words.
template <class Visit>
__device__ void for_each_word(const PatternPages& pages, std::uint64_t page, Visit&& visit) {
  const auto plane = static_cast<std::uint32_t>(page / pages.num_segments);
  const auto segment = static_cast<std::uint32_t>(page % pages.num_segments);
  const auto words_per_vector = static_cast<std::uint32_t>(pages.words_per_vector());
  const std::uint32_t num_vectors = pages.token_counts[segment] * pages.num_heads;
  const std::uint64_t num_words = static_cast<std::uint64_t>(num_vectors) * words_per_vector;
  const std::uint64_t step = static_cast<std::uint64_t>(gridDim.y) * blockDim.x;
  for (std::uint64_t index = blockIdx.y * blockDim.x + threadIdx.x; index < num_words;
       index += step) {
    const auto flat = static_cast<std::uint32_t>(index);  // 64-bit divisions are slow
    const std::uint32_t vector_index = flat / words_per_vector;
    const std::uint32_t token = vector_index / pages.num_heads;
    const std::uint32_t head = vector_index - token * pages.num_heads;
    const std::uint32_t word = flat - vector_index * words_per_vector;
    const PatternPages::Vector vector = pages.vector(plane, segment, token, head);
    visit(vector.address + static_cast<std::uint64_t>(word) * pages.chunk_bytes(), vector.key, word,
          static_cast<std::uint64_t>(plane) * pages.num_heads + head);
  }
}

__device__ std::uint64_t load_chunk(std::uint64_t address, std::uint32_t num_bytes) {
  if (num_bytes == 8 && address % 8 == 0) return *reinterpret_cast<const std::uint64_t*>(address);
  if (num_bytes == 4 && address % 4 == 0) return *reinterpret_cast<const std::uint32_t*>(address);
  std::uint64_t bits = 0;
  for (std::uint32_t byte = 0; byte < num_bytes; ++byte) {
    const std::uint64_t value = reinterpret_cast<const std::uint8_t*>(address)[byte];
    bits |= value << (8 * byte);
  }
  return bits;
}

__device__ void store_chunk(std::uint64_t address, const PatternChunk& chunk) {
  if (chunk.num_bytes == 8 && address % 8 == 0) {
    *reinterpret_cast<std::uint64_t*>(address) = chunk.bits;
    return;
  }
  for (std::uint32_t byte = 0; byte < chunk.num_bytes; ++byte) {
    reinterpret_cast<std::uint8_t*>(address)[byte] =
        static_cast<std::uint8_t>(chunk.bits >> (8 * byte));
  }
}

__global__ void fill_kernel(PatternPages pages, std::uint64_t seed) {
  for (std::uint64_t page = blockIdx.x; page < pages.num_pages(); page += gridDim.x) {
    for_each_word(pages, page,
                  [&](std::uint64_t address, std::uint64_t key, std::uint32_t word, std::uint64_t) {
                    store_chunk(address,
                                pattern_chunk<Conversion::kNone>(pages, seed, key, word, 1.0f));
                  });
  }
}

template <Conversion kConversion>
__global__ void check_kernel(PatternPages pages, std::uint64_t seed, unsigned long long* wrong,
                             unsigned long long* first_page) {
  unsigned long long own_wrong = 0;
  for (std::uint64_t page = blockIdx.x; page < pages.num_pages(); page += gridDim.x) {
    const unsigned long long before = own_wrong;
    for_each_word(
        pages, page,
        [&](std::uint64_t address, std::uint64_t key, std::uint32_t word, std::uint64_t scale) {
          const float inverse_scale =
              kConversion == Conversion::kNone ? 1.0f : pages.inverse_scales[scale];
          const PatternChunk chunk =
              pattern_chunk<kConversion>(pages, seed, key, word, inverse_scale);
          own_wrong += count_wrong<kConversion>(chunk, load_chunk(address, chunk.num_bytes));
        });
    if (own_wrong != before) atomicMin(first_page, static_cast<unsigned long long>(page));
  }
  if (own_wrong != 0) atomicAdd(wrong, own_wrong);
}

/// Device memory for the length of a call.
class Scratch {
 public:
  explicit Scratch(std::size_t num_bytes) { KVXFER_CUDA_CHECK(cudaMalloc(&data_, num_bytes)); }
  ~Scratch() { (void)cudaFree(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  [[nodiscard]] std::uint64_t* words() const { return static_cast<std::uint64_t*>(data_); }

 private:
  void* data_ = nullptr;
};

/// The pages' tables on the device, and a view of the pages through them.
class DevicePages {
 public:
  explicit DevicePages(const PatternPages& host) : tables_(table_bytes(host)), pages_(host) {
    pages_.planes = upload(host.planes, host.num_planes);
    pages_.plane_keys = upload(host.plane_keys, host.num_planes);
    pages_.offsets = upload(host.offsets, host.num_segments);
    pages_.token_keys = upload(host.token_keys, host.num_segments);
    pages_.token_counts = upload(host.token_counts, host.num_segments);
    pages_.inverse_scales = upload(host.inverse_scales, num_scales(host));
  }
  [[nodiscard]] const PatternPages& view() const { return pages_; }
  /// Blocks for each page, and more of them where there are few pages.
  [[nodiscard]] dim3 grid() const {
    const auto num_pages = static_cast<unsigned>(std::min(pages_.num_pages(), kMaxBlocks));
    return {num_pages, static_cast<unsigned>(kMaxBlocks / num_pages)};
  }

 private:
  static std::uint64_t num_scales(const PatternPages& pages) {
    const bool converted = pages.conversion != Conversion::kNone;
    return converted ? static_cast<std::uint64_t>(pages.num_planes) * pages.num_heads : 0;
  }
  static std::size_t table_bytes(const PatternPages& pages) {
    return (2ull * pages.num_planes + 2ull * pages.num_segments) * sizeof(std::uint64_t) +
           pages.num_segments * sizeof(std::uint32_t) + num_scales(pages) * sizeof(float);
  }
  /// The tables of 8-byte entries go first, so that each is aligned.
  template <class T>
  const T* upload(const T* table, std::uint64_t count) {
    T* at = reinterpret_cast<T*>(reinterpret_cast<char*>(tables_.words()) + used_bytes_);
    KVXFER_CUDA_CHECK(cudaMemcpy(at, table, count * sizeof(T), cudaMemcpyHostToDevice));
    used_bytes_ += count * sizeof(T);
    return at;
  }

  Scratch tables_;
  PatternPages pages_;
  std::uint64_t used_bytes_ = 0;
};

}  // namespace

void pattern_fill_device(int device, const PatternPages& pages, std::uint64_t seed) {
  require_fillable(pages);
  if (pages.num_pages() == 0) return;
  const DeviceGuard guard(device);
  const DevicePages on_device(pages);
  fill_kernel<<<on_device.grid(), kThreads>>>(on_device.view(), seed);
  KVXFER_CUDA_CHECK(cudaGetLastError());
  KVXFER_CUDA_CHECK(cudaDeviceSynchronize());
}

PatternMismatch pattern_check_device(int device, const PatternPages& pages, std::uint64_t seed) {
  if (pages.num_pages() == 0) return {};
  const DeviceGuard guard(device);
  const DevicePages on_device(pages);
  const Scratch result(2 * sizeof(std::uint64_t));
  const PatternMismatch none;
  const std::uint64_t initial[2] = {none.num_wrong_words, none.first_page};
  KVXFER_CUDA_CHECK(cudaMemcpy(result.words(), initial, sizeof(initial), cudaMemcpyHostToDevice));
  auto* counters = reinterpret_cast<unsigned long long*>(result.words());
  with_conversion(pages.conversion, [&]<Conversion kConversion>() {
    check_kernel<kConversion>
        <<<on_device.grid(), kThreads>>>(on_device.view(), seed, counters, counters + 1);
  });
  KVXFER_CUDA_CHECK(cudaGetLastError());
  std::uint64_t found[2];
  KVXFER_CUDA_CHECK(cudaMemcpy(found, result.words(), sizeof(found), cudaMemcpyDeviceToHost));
  return {found[0], found[1]};
}

}  // namespace kvxfer
