#include <cuda_runtime.h>

#include "copy/device_copier.hpp"
#include "core/cuda_check.hpp"

namespace kvxfer {

namespace {

constexpr int kThreads = 256;

__global__ void fill_kernel(PatternPages pages, std::uint64_t seed) {
  const std::uint64_t num_words = pages.page_bytes / sizeof(std::uint64_t);
  for (std::uint64_t page = blockIdx.x; page < pages.num_pages(); page += gridDim.x) {
    auto* words = reinterpret_cast<std::uint64_t*>(pages.address(page));
    const std::uint64_t key = pages.key(page);
    for (std::uint64_t word = threadIdx.x; word < num_words; word += blockDim.x) {
      words[word] = pattern_word(seed, key, word);
    }
  }
}

__global__ void check_kernel(PatternPages pages, std::uint64_t seed, unsigned long long* wrong,
                             unsigned long long* first_page) {
  const std::uint64_t num_words = pages.page_bytes / sizeof(std::uint64_t);
  unsigned long long own_wrong = 0;
  for (std::uint64_t page = blockIdx.x; page < pages.num_pages(); page += gridDim.x) {
    const auto* words = reinterpret_cast<const std::uint64_t*>(pages.address(page));
    const std::uint64_t key = pages.key(page);
    for (std::uint64_t word = threadIdx.x; word < num_words; word += blockDim.x) {
      if (words[word] == pattern_word(seed, key, word)) continue;
      ++own_wrong;
      atomicMin(first_page, static_cast<unsigned long long>(page));
    }
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
  explicit DevicePages(const PatternPages& host)
      : tables_((2ull * host.num_planes + 2ull * host.num_blocks) * sizeof(std::uint64_t)),
        pages_(host) {
    pages_.planes = upload(host.planes, host.num_planes);
    pages_.plane_keys = upload(host.plane_keys, host.num_planes);
    pages_.offsets = upload(host.offsets, host.num_blocks);
    pages_.block_keys = upload(host.block_keys, host.num_blocks);
  }
  [[nodiscard]] const PatternPages& view() const { return pages_; }
  [[nodiscard]] int num_blocks() const {
    return static_cast<int>(pages_.num_pages() < 4096 ? pages_.num_pages() : 4096);
  }

 private:
  const std::uint64_t* upload(const std::uint64_t* table, std::uint64_t count) {
    std::uint64_t* at = tables_.words() + used_;
    KVXFER_CUDA_CHECK(cudaMemcpy(at, table, count * sizeof(std::uint64_t), cudaMemcpyHostToDevice));
    used_ += count;
    return at;
  }

  Scratch tables_;
  PatternPages pages_;
  std::uint64_t used_ = 0;
};

}  // namespace

void pattern_fill_device(int device, const PatternPages& pages, std::uint64_t seed) {
  if (pages.num_pages() == 0) return;
  const DeviceGuard guard(device);
  const DevicePages on_device(pages);
  fill_kernel<<<on_device.num_blocks(), kThreads>>>(on_device.view(), seed);
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
  check_kernel<<<on_device.num_blocks(), kThreads>>>(on_device.view(), seed, counters,
                                                     counters + 1);
  KVXFER_CUDA_CHECK(cudaGetLastError());
  std::uint64_t found[2];
  KVXFER_CUDA_CHECK(cudaMemcpy(found, result.words(), sizeof(found), cudaMemcpyDeviceToHost));
  return {found[0], found[1]};
}

}  // namespace kvxfer
