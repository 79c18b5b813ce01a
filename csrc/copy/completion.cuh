#pragma once

// The end of a copy kernel, in this order: each issuing thread has waited until its stores are
// complete at the destination; it fences at system scope; the block joins; its first thread counts
// the block in; the last block alone stores the sequence number, with release order at system
// scope, into host memory that both processes map. One block's flag would say nothing of the
// others.

#include <cstdint>

#include "copy/paged_copy.cuh"

namespace kvxfer {

__device__ inline void sleep_milliseconds(int milliseconds) {
  for (int step = 0; step < 2 * milliseconds; ++step) __nanosleep(500000);
}

__device__ __forceinline__ void plant_delay(const KernelArgs& args) {
  if (args.fault != CopyFault::kNone && blockIdx.x == 0) sleep_milliseconds(20);
}

__device__ __forceinline__ void store_flag(const KernelArgs& args) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(args.flag), "l"(args.sequence)
               : "memory");
}

/// Called by all threads of a block once their own stores are complete.
__device__ __forceinline__ void signal_when_last(const KernelArgs& args) {
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();
  const std::uint32_t arrived = atomicAdd(args.arrivals, 1u) + 1;
  const bool last = arrived == gridDim.x;
  if (last) *args.arrivals = 0;  // the next kernel of the stream counts from zero
  if (last || args.fault == CopyFault::kSignalEarly) {
    __threadfence_system();
    store_flag(args);
  }
}

}  // namespace kvxfer
