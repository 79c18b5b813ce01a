// The paged copy by plain loads and stores, a warp a piece: for any GPU and any alignment, and for
// requests so small that setting up shared memory would cost more than it saves.

#include <cuda_runtime.h>

#include <cstdint>

#include "copy/completion.cuh"
#include "copy/convert.cuh"
#include "copy/device_walk.cuh"
#include "copy/paged_copy.cuh"
#include "core/cuda_check.hpp"

namespace kvxfer {

namespace {

constexpr int kLoadStoreThreads = 1024;

template <typename Word>
__device__ __forceinline__ void copy_words(const Piece& piece, std::uint32_t lane) {
  constexpr int kUnroll = 8;
  const auto* src = reinterpret_cast<const Word*>(piece.src);
  auto* dst = reinterpret_cast<Word*>(piece.dst);
  const std::uint32_t num_words = piece.num_bytes / sizeof(Word);
  std::uint32_t at = lane;
  for (; at + (kUnroll - 1) * kLanes < num_words; at += kUnroll * kLanes) {
    Word words[kUnroll];
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) words[step] = src[at + step * kLanes];
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) dst[at + step * kLanes] = words[step];
  }
  for (; at < num_words; at += kLanes) dst[at] = src[at];
}

/// Word is what one lane reads at a time: eight elements or one.
template <typename Word, Conversion kConversion>
__device__ __forceinline__ void convert_words(const Piece& piece, std::uint32_t lane) {
  const auto* src = reinterpret_cast<const Word*>(piece.src);
  const std::uint32_t num_words = piece.num_bytes / sizeof(Word);
#pragma unroll 4
  for (std::uint32_t at = lane; at < num_words; at += kLanes) {
    if constexpr (sizeof(Word) == 16) {
      const uint4 four = src[at];
      reinterpret_cast<uint2*>(piece.dst)[at] = {
          convert_four<kConversion>(four.x, four.y, piece.inverse_scale),
          convert_four<kConversion>(four.z, four.w, piece.inverse_scale)};
    } else {
      reinterpret_cast<std::uint8_t*>(piece.dst)[at] =
          static_cast<std::uint8_t>(convert_pair<kConversion>(src[at], piece.inverse_scale));
    }
  }
}

template <typename Word, Conversion kConversion>
__global__ void __launch_bounds__(kLoadStoreThreads, 1)
    load_store_copy_kernel(const __grid_constant__ KernelArgs args) {
  const std::uint32_t warp = threadIdx.x / kLanes;
  const std::uint32_t lane = threadIdx.x % kLanes;
  const std::uint32_t step = gridDim.x * (blockDim.x / kLanes);
  GroupCursor cursor(args);
  plant_delay(args);
  for (std::uint32_t group = blockIdx.x + gridDim.x * warp; group < args.num_groups;
       group += step) {
    const Piece piece = cursor.piece<kConversion>(group, 0);  // groups of one piece
    if constexpr (kConversion != Conversion::kNone) {
      convert_words<Word, kConversion>(piece, lane);
    } else {
      copy_words<Word>(piece, lane);
    }
  }
  signal_when_last(args);
}

__global__ void signal_kernel(const __grid_constant__ KernelArgs args) {
  __threadfence_system();
  store_flag(args);
}

template <typename Word, Conversion kConversion>
void launch(const KernelArgs& args, int num_blocks, cudaStream_t stream) {
  load_store_copy_kernel<Word, kConversion><<<num_blocks, kLoadStoreThreads, 0, stream>>>(args);
}

template <Conversion kConversion>
void launch_converting(const KernelArgs& args, int num_blocks, cudaStream_t stream) {
  if (args.word_bytes >= 8) {
    launch<uint4, kConversion>(args, num_blocks, stream);
  } else {
    launch<std::uint16_t, kConversion>(args, num_blocks, stream);
  }
}

void launch_plain(const KernelArgs& args, int num_blocks, cudaStream_t stream) {
  if (args.word_bytes == 16) {
    launch<uint4, Conversion::kNone>(args, num_blocks, stream);
  } else if (args.word_bytes >= 4) {
    launch<std::uint32_t, Conversion::kNone>(args, num_blocks, stream);
  } else {
    launch<std::uint8_t, Conversion::kNone>(args, num_blocks, stream);
  }
}

}  // namespace

void launch_load_store_copy(const KernelArgs& args, int num_blocks, void* stream) {
  auto* cuda_stream = static_cast<cudaStream_t>(stream);
  switch (args.conversion) {
    case Conversion::kNone:
      launch_plain(args, num_blocks, cuda_stream);
      break;
    case Conversion::kBf16ToE4m3:
      launch_converting<Conversion::kBf16ToE4m3>(args, num_blocks, cuda_stream);
      break;
    case Conversion::kF16ToE4m3:
      launch_converting<Conversion::kF16ToE4m3>(args, num_blocks, cuda_stream);
      break;
  }
  KVXFER_CUDA_CHECK(cudaGetLastError());
}

void launch_signal(const KernelArgs& args, void* stream) {
  signal_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(args);
  KVXFER_CUDA_CHECK(cudaGetLastError());
}

}  // namespace kvxfer
