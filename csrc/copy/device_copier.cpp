#include "copy/device_copier.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "copy/launch_tables.hpp"
#include "copy/paged_copy.cuh"
#include "core/check.hpp"
#include "core/cuda_check.hpp"

namespace kvxfer {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kBulkMajor = 9;  // the compute capability that brought bulk-asynchronous copies
constexpr std::uint32_t kBulkAlignment = 16;
constexpr std::uint32_t kLoadStorePieceBytes = 16 << 10;
constexpr int kLoadStoreWarps = 32;
constexpr std::size_t kBarrierSlack = 128;  // the barriers' area is rounded up to this
constexpr int kSharedBytes = 224 << 10;     // of 227 KiB a block may ask for on sm_90 and sm_100
constexpr double kQueueTimeoutS = 10;
constexpr double kHealthPeriodS = 0.002;

// A few pages are there sooner without the set-up of shared memory.
constexpr std::uint64_t kLoadStoreBytes = 256 << 10;

// Where the copy engine overtakes the kernel, measured on two H200s with runs of one size.
constexpr std::uint64_t kDmaRunBytes = 32ull << 20;
constexpr std::uint64_t kMaxDmaRuns = 512;

// Measured best on H200s with 4 to 16 SMs at every page size from 2 KiB on; with all SMs the shapes
// do not differ.
constexpr BulkShape kBestShape{16, 3, 4096, 1};

/// What one transfer in flight needs: its tables on both sides of the bus. Its flag says when they
/// may be used again, since the kernel raises it after it has read them.
struct Flight {
  void* pinned = nullptr;
  void* device = nullptr;
  std::size_t capacity_bytes = 0;
  std::uint32_t* arrivals = nullptr;
  CompletionTarget target{};  // sequence 0: never used
  std::uint64_t posted = 0;   // the number of its post

  void release() noexcept {
    (void)cudaFreeHost(pinned);
    (void)cudaFree(device);
  }
  void reserve(std::size_t num_bytes) {
    if (num_bytes <= capacity_bytes) return;
    (void)cudaFreeHost(std::exchange(pinned, nullptr));
    (void)cudaFree(std::exchange(device, nullptr));
    capacity_bytes = 0;
    const std::size_t rounded = std::max<std::size_t>(64 << 10, num_bytes + num_bytes / 2);
    KVXFER_CUDA_CHECK(cudaMallocHost(&pinned, rounded));
    KVXFER_CUDA_CHECK(cudaMalloc(&device, rounded));
    capacity_bytes = rounded;
  }
};

/// How a kernel is to run.
struct Launch {
  CopyEngine engine;
  int num_sms;
  BulkShape shape;

  [[nodiscard]] PieceLimits limits() const {
    if (engine == CopyEngine::kLoadStore) return {kLoadStorePieceBytes, 0};
    const auto slot_bytes = static_cast<std::uint32_t>(shape.slot_bytes);
    return {slot_bytes, slot_bytes};
  }
};

int blocks_for(std::uint64_t groups, int num_sms, int warps_per_block) {
  const std::uint64_t useful = (groups + warps_per_block - 1) / warps_per_block;
  // Spread few pages over many SMs: a block a group is faster than a warp a group.
  const std::uint64_t wanted = std::max<std::uint64_t>(useful, std::min<std::uint64_t>(groups, 64));
  return static_cast<int>(
      std::clamp<std::uint64_t>(wanted, 1, static_cast<std::uint64_t>(num_sms)));
}

}  // namespace

struct DeviceCopier::State {
  State(int device_index, std::uint64_t address, std::uint32_t num_slots)
      : device(device_index), board(address, num_slots), board_address(address) {
    const DeviceGuard guard(device);
    KVXFER_CUDA_CHECK(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    KVXFER_CUDA_CHECK(
        cudaDeviceGetAttribute(&compute_major, cudaDevAttrComputeCapabilityMajor, device));
  }

  void open() {
    const DeviceGuard guard(device);
    int lowest = 0;
    int highest = 0;
    KVXFER_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    KVXFER_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest));
    if (compute_major >= kBulkMajor) prepare_bulk_copy(kSharedBytes);
    void* host = reinterpret_cast<void*>(board_address);
    KVXFER_CUDA_CHECK(cudaHostRegister(host, board.num_slots() * CompletionBoard::kSlotBytes,
                                       cudaHostRegisterMapped | cudaHostRegisterPortable));
    board_registered = true;
    void* mapped = nullptr;
    KVXFER_CUDA_CHECK(cudaHostGetDevicePointer(&mapped, host, 0));
    board_on_device = reinterpret_cast<std::uint64_t>(mapped);
    KVXFER_CUDA_CHECK(cudaMalloc(&counters, kMaxInFlight * sizeof(std::uint32_t)));
    KVXFER_CUDA_CHECK(cudaMemsetAsync(counters, 0, kMaxInFlight * sizeof(std::uint32_t), stream));
    for (int index = 0; index < kMaxInFlight; ++index) {
      flights[index].arrivals = static_cast<std::uint32_t*>(counters) + index;
    }
  }

  ~State() {
    int previous = 0;
    (void)cudaGetDevice(&previous);
    (void)cudaSetDevice(device);
    if (stream != nullptr) {
      (void)cudaStreamSynchronize(stream);
      (void)cudaStreamDestroy(stream);
    }
    for (auto& flight : flights) flight.release();
    (void)cudaFree(counters);
    if (board_registered) (void)cudaHostUnregister(reinterpret_cast<void*>(board_address));
    (void)cudaSetDevice(previous);
  }

  /// The first flight that is idle, so that few of them ever get tables: making those takes longer
  /// than a copy. Else the one that was posted first, once it is idle.
  Flight& take_flight() {
    for (Flight& flight : flights) {
      const CompletionTarget& target = flight.target;
      if (target.sequence == 0 || board.load(target.slot) >= target.sequence) return flight;
    }
    Flight& flight = *std::min_element(
        flights.begin(), flights.end(),
        [](const Flight& one, const Flight& other) { return one.posted < other.posted; });
    if (!wait(flight.target, kQueueTimeoutS)) {
      throw Error(ErrorKind::kTransferTimeout,
                  std::to_string(kMaxInFlight) + " transfers are in flight and none ended in " +
                      std::to_string(static_cast<int>(kQueueTimeoutS)) +
                      " s; wait for earlier ones first");
    }
    return flight;
  }

  bool wait(CompletionTarget target, double timeout_s) const {
    const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s);
    while (true) {
      const double left_s = std::chrono::duration<double>(deadline - Clock::now()).count();
      if (board.wait(target.slot, target.sequence, std::min(left_s, kHealthPeriodS))) return true;
      const cudaError_t status = cudaStreamQuery(stream);
      if (status != cudaSuccess && status != cudaErrorNotReady) {
        throw Error(ErrorKind::kCuda,
                    std::string("the GPU failed during a transfer: ") + cudaGetErrorString(status) +
                        "; this process must end",
                    static_cast<int>(status));
      }
      if (left_s <= kHealthPeriodS) return false;
    }
  }

  [[nodiscard]] BulkShape shape_for(const CopyPlan& plan) const {
    const bool forced = forced_shape.num_warps != 0 && plan.conversion == Conversion::kNone;
    return forced ? forced_shape : kBestShape;
  }

  void upload(const LaunchTables& tables, const SegmentLookup* lookup, Flight& flight,
              KernelArgs& args) const {
    args.num_boxes = tables.num_boxes();
    args.num_groups = tables.num_groups();
    if (lookup == nullptr && tables.num_words() <= kInlineWords) {
      tables.write(args.inline_tables);
      return;
    }
    const std::size_t num_bytes = tables.num_words() * sizeof(std::uint64_t);
    flight.reserve(num_bytes);
    tables.write(static_cast<std::uint64_t*>(flight.pinned));
    KVXFER_CUDA_CHECK(
        cudaMemcpyAsync(flight.device, flight.pinned, num_bytes, cudaMemcpyHostToDevice, stream));
    args.tables = static_cast<const std::uint64_t*>(flight.device);
    if (lookup == nullptr) return;
    const auto* segments = args.tables + 2 * static_cast<std::size_t>(args.num_planes);
    launch_look_up(*lookup, reinterpret_cast<std::uint64_t>(segments), args.num_segments, stream);
  }

  void launch(const LaunchTables& tables, const Launch& launch, const SegmentLookup* lookup,
              Flight& flight, KernelArgs& args) const {
    upload(tables, lookup, flight, args);
    if (launch.engine == CopyEngine::kLoadStore) {
      launch_load_store_copy(args, blocks_for(args.num_groups, launch.num_sms, kLoadStoreWarps),
                             stream);
      return;
    }
    launch_bulk_copy(
        args, {blocks_for(args.num_groups, launch.num_sms, launch.shape.num_warps), launch.shape},
        stream);
  }

  int device;
  CompletionBoard board;
  std::uint64_t board_address;
  std::uint64_t board_on_device = 0;
  bool board_registered = false;
  int num_sms = 0;
  int compute_major = 0;
  cudaStream_t stream = nullptr;
  void* counters = nullptr;
  std::array<Flight, kMaxInFlight> flights{};
  std::uint64_t num_posted = 0;
  BulkShape forced_shape{};
  std::mutex mutex;
};

DeviceCopier::DeviceCopier(int device, std::uint64_t board_address, std::uint32_t board_slots)
    : state_(std::make_unique<State>(device, board_address, board_slots)) {
  state_->open();
}

DeviceCopier::~DeviceCopier() = default;

namespace {

bool long_runs(const CopyPlan& plan, const SegmentLookup* lookup) {
  if (plan.num_boxes != 1 || lookup != nullptr) return false;
  const CopyBox& box = plan.boxes[0];
  const auto runs =
      merge_segments(plan, box, kMaxDmaRuns / std::max<std::uint32_t>(box.num_planes, 1)).size();
  return runs != 0 && box.num_segments * box.run_bytes / runs >= kDmaRunBytes;
}

CopyEngine choose_engine(CopyEngine wanted, const CopyPlan& plan, const SegmentLookup* lookup,
                         int compute_major, std::uint32_t word_bytes) {
  const bool bulk_works = compute_major >= kBulkMajor && word_bytes == kBulkAlignment;
  switch (wanted) {
    case CopyEngine::kBulk:
      KVXFER_REQUIRE(bulk_works,
                     "the bulk kernel needs sm_90 and 16-byte alignment; this GPU is sm_" +
                         std::to_string(compute_major) + "x and the pages are aligned to " +
                         std::to_string(word_bytes) + "; use the load/store kernel");
      return wanted;
    case CopyEngine::kDma:
      KVXFER_REQUIRE(plan.conversion == Conversion::kNone,
                     "the copy engine cannot convert to fp8; use a kernel, or auto");
      KVXFER_REQUIRE(lookup == nullptr,
                     "the copy engine cannot look descriptors up; use a kernel, or auto");
      return wanted;
    case CopyEngine::kLoadStore:
      return wanted;
    case CopyEngine::kAuto:
      break;
  }
  if (long_runs(plan, lookup)) return CopyEngine::kDma;
  if (!bulk_works || plan.total_bytes() <= kLoadStoreBytes) return CopyEngine::kLoadStore;
  return CopyEngine::kBulk;
}

void check_shape(const BulkShape& shape) {
  const bool sane = shape.num_warps >= 1 && shape.num_warps <= 16 && shape.num_stages >= 2 &&
                    shape.num_stages <= 64 && shape.slot_bytes >= 512 &&
                    shape.slot_bytes % 128 == 0 && shape.store_depth >= 1 &&
                    shape.store_depth <= 4 && shape.store_depth < shape.num_stages;
  const std::size_t bytes = static_cast<std::size_t>(shape.num_warps) * shape.num_stages *
                            (static_cast<std::size_t>(shape.slot_bytes) + 8);
  KVXFER_REQUIRE(sane && bytes + kBarrierSlack <= kSharedBytes,
                 "a bulk shape of " + std::to_string(shape.num_warps) + " warps x " +
                     std::to_string(shape.num_stages) + " slots x " +
                     std::to_string(shape.slot_bytes) + " bytes, depth " +
                     std::to_string(shape.store_depth) +
                     " does not fit 224 KiB or the ranges "
                     "1-16, 2-64, 512.., 1-4");
}

void copy_range(std::uint64_t dst, std::uint64_t src, std::uint64_t num_bytes,
                cudaStream_t stream) {
  KVXFER_CUDA_CHECK(cudaMemcpyAsync(reinterpret_cast<void*>(dst), reinterpret_cast<void*>(src),
                                    num_bytes, cudaMemcpyDefault, stream));
}

void copy_rows(const CopyBox& box, const CopyPlan::PagePair& page, cudaStream_t stream) {
  for (std::uint32_t outer = 0; outer < box.outer.count; ++outer) {
    for (std::uint32_t inner = 0; inner < box.inner.count; ++inner) {
      copy_range(page.dst + outer * box.outer.dst_stride + inner * box.inner.dst_stride,
                 page.src + outer * box.outer.src_stride + inner * box.inner.src_stride,
                 box.run_bytes, stream);
    }
  }
}

void copy_by_engine(const CopyPlan& plan, cudaStream_t stream) {
  for (std::uint32_t index = 0; index < plan.num_boxes; ++index) {
    const CopyBox& box = plan.boxes[index];
    const auto runs = merge_segments(plan, box, box.num_segments);
    for (std::uint32_t plane = 0; plane < box.num_planes; ++plane) {
      for (const SegmentRun& run : runs) {
        const auto page = plan.page(box, plane, run.first);
        copy_range(page.dst, page.src, run.count * box.run_bytes, stream);
      }
      if (!runs.empty()) continue;
      for (std::uint32_t segment = 0; segment < box.num_segments; ++segment) {
        copy_rows(box, plan.page(box, plane, segment), stream);
      }
    }
  }
}

}  // namespace

CopyEngine DeviceCopier::post(const CopyPlan& plan, const DeviceCopyOptions& options,
                              CompletionTarget target, const StreamMark* after,
                              const SegmentLookup* lookup) {
  State& state = *state_;
  KVXFER_REQUIRE(options.num_sms >= 0 && options.num_sms <= state.num_sms,
                 "num_sms is " + std::to_string(options.num_sms) + "; this GPU has " +
                     std::to_string(state.num_sms) + " (0 = all)");
  const int num_sms = options.num_sms == 0 ? state.num_sms : options.num_sms;
  std::lock_guard lock(state.mutex);
  const DeviceGuard guard(state.device);

  KernelArgs args{};
  args.num_planes = plan.num_planes;
  args.num_segments = plan.num_segments;
  args.word_bytes = common_word_bytes(plan);
  args.conversion = plan.conversion;
  args.flag = reinterpret_cast<std::uint64_t*>(
      state.board_on_device + state.board.slot_address(target.slot) - state.board_address);
  args.sequence = target.sequence;
  args.fault = options.fault;
  KVXFER_REQUIRE(args.word_bytes != 0, "converted elements of 2 bytes lie at an odd address");

  const CopyEngine engine =
      choose_engine(options.engine, plan, lookup, state.compute_major, args.word_bytes);
  const Launch launch{engine, num_sms, state.shape_for(plan)};
  std::optional<LaunchTables> tables;  // before anything is queued: a refused plan leaves nothing
  if (engine != CopyEngine::kDma) tables.emplace(plan, launch.limits());

  Flight& flight = state.take_flight();
  args.arrivals = flight.arrivals;
  try {
    if (after != nullptr) after->hold_back(reinterpret_cast<std::uint64_t>(state.stream));
    if (tables && tables->num_groups() != 0) {
      state.launch(*tables, launch, lookup, flight, args);
    } else {
      copy_by_engine(plan, state.stream);
      launch_signal(args, state.stream);
    }
  } catch (...) {
    // Refused half way: who is told so will use its pages and this flight's tables again.
    (void)cudaStreamSynchronize(state.stream);
    throw;
  }
  flight.target = target;  // last: nobody may wait for what was refused
  flight.posted = ++state.num_posted;
  return engine;
}

bool DeviceCopier::wait(CompletionTarget target, double timeout_s) {
  return state_->wait(target, timeout_s);
}

void DeviceCopier::set_bulk_shape(const BulkShape& shape) {
  if (shape.num_warps != 0) check_shape(shape);
  std::lock_guard lock(state_->mutex);
  state_->forced_shape = shape;
}

}  // namespace kvxfer
