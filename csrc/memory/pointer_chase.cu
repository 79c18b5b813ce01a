#include <cuda_runtime.h>

#include <string>

#include "core/check.hpp"
#include "core/cuda_check.hpp"
#include "memory/pointer_chase.hpp"

namespace kvxfer {

namespace {

// std::has_single_bit is of C++20, which nvcc is not asked for.
constexpr bool is_power_of_two(std::uint64_t number) {
  return number != 0 && (number & (number - 1)) == 0;
}

struct Outcome {
  std::uint64_t last_index;
  std::uint64_t elapsed_ns;
};

__device__ std::uint64_t now_ns() {
  std::uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

__device__ std::uint64_t follow(const IndexRing& ring, std::uint64_t index) {
  const std::uint64_t slot = index & (ring.num_slots - 1);
  return *reinterpret_cast<const volatile std::uint64_t*>(ring.address + slot * ring.stride_bytes);
}

__global__ void chase_kernel(IndexRing ring, std::uint32_t num_hops, Outcome* outcome) {
  std::uint64_t index = 0;
  const std::uint64_t start = now_ns();
  for (std::uint32_t hop = 0; hop < num_hops; ++hop) index = follow(ring, index);
  outcome->last_index = index;  // before the second time, which must not be read early
  __threadfence_system();
  outcome->elapsed_ns = now_ns() - start;
}

/// An outcome that the GPU writes and the host reads.
class MappedOutcome {
 public:
  MappedOutcome() { KVXFER_CUDA_CHECK(cudaMallocHost(&data_, sizeof(Outcome))); }
  ~MappedOutcome() { (void)cudaFreeHost(data_); }
  MappedOutcome(const MappedOutcome&) = delete;
  MappedOutcome& operator=(const MappedOutcome&) = delete;
  [[nodiscard]] Outcome* get() const { return static_cast<Outcome*>(data_); }

 private:
  void* data_ = nullptr;
};

}  // namespace

ChaseResult chase_pointers(int device, const IndexRing& ring, std::uint32_t num_hops) {
  KVXFER_REQUIRE(is_power_of_two(ring.num_slots) && num_hops != 0,
                 std::to_string(ring.num_slots) + " slots and " + std::to_string(num_hops) +
                     " hops; use a power of two, and one hop or more");
  KVXFER_REQUIRE(
      ring.address % 8 == 0 && ring.stride_bytes % 8 == 0 && ring.stride_bytes != 0,
      "an index lies at a multiple of 8 bytes; the stride is " + std::to_string(ring.stride_bytes));
  const DeviceGuard guard(device);
  const MappedOutcome outcome;
  chase_kernel<<<1, 1>>>(ring, num_hops, outcome.get());
  KVXFER_CUDA_CHECK(cudaGetLastError());
  KVXFER_CUDA_CHECK(cudaDeviceSynchronize());
  const Outcome found = *outcome.get();
  return {found.last_index, static_cast<double>(found.elapsed_ns) / num_hops};
}

}  // namespace kvxfer
