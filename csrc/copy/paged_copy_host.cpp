#include "copy/paged_copy_host.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "copy/fp8.hpp"
#include "copy/plan_units.hpp"

namespace kvxfer {

namespace {

constexpr std::uint64_t kLine = 64;
constexpr std::uint64_t kMaxRunBytes = 1ull << 40;  // no limit: every page fits

void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

void copy_plain(const CopyUnit& unit) {
  const std::uint64_t run_bytes = unit.run_bytes;
  for_each_run(unit, [run_bytes](const CopyRun& run) {
    std::memcpy(pointer(run.dst), pointer(run.src), run_bytes);
  });
}

#if defined(__x86_64__)
// memcpy keeps pages of a few KiB in the cache on both sides; for a transfer larger than the cache
// that costs a read of every destination line. 16-byte streaming stores are SSE2: every x86-64 has
// them.
void stream_line(std::uint64_t dst, std::uint64_t src) {
  const auto* from = static_cast<const __m128i*>(pointer(src));
  auto* to = static_cast<__m128i*>(pointer(dst));
  const __m128i a = _mm_loadu_si128(from);
  const __m128i b = _mm_loadu_si128(from + 1);
  const __m128i c = _mm_loadu_si128(from + 2);
  const __m128i d = _mm_loadu_si128(from + 3);
  _mm_stream_si128(to, a);
  _mm_stream_si128(to + 1, b);
  _mm_stream_si128(to + 2, c);
  _mm_stream_si128(to + 3, d);
}
void drain_streams() { _mm_sfence(); }
#else
void stream_line(std::uint64_t dst, std::uint64_t src) {
  std::memcpy(pointer(dst), pointer(src), kLine);
}
void drain_streams() {}
#endif

// One stream of reads cannot fill a core's share of the memory bandwidth when it jumps every few
// KiB: the hardware prefetcher starts anew at each jump. Several units side by side keep it busy.
constexpr int kStreams = 4;
constexpr std::uint64_t kStepBytes = 256;

/// Collects units and copies them with streaming stores, kStreams at a time where they are alike.
class StreamingCopy {
 public:
  void add(const CopyUnit& unit) {
    if (!whole_lines(unit)) {
      copy_plain(unit);
      return;
    }
    if (num_units_ > 0 && !alike(unit, units_[0])) flush();
    units_[num_units_++] = unit;
    if (num_units_ == kStreams) flush();
  }

  void finish() {
    flush();
    // Streaming stores are weakly ordered: without this a completion flag could overtake them.
    drain_streams();
  }

 private:
  /// Whether each row can be streamed line by line from its first byte to its last.
  static bool whole_lines(const CopyUnit& unit) {
    const std::uint64_t places =
        unit.first.dst | unit.run_bytes | unit.box->outer.dst_stride | unit.box->inner.dst_stride;
    return places % kLine == 0;
  }
  static bool alike(const CopyUnit& one, const CopyUnit& other) {
    return one.box == other.box && one.first_inner == other.first_inner &&
           one.num_rows == other.num_rows && one.run_bytes == other.run_bytes;
  }

  void flush() {
    if (num_units_ == kStreams) {
      copy_side_by_side();
    } else {
      for (int index = 0; index < num_units_; ++index) copy_plain(units_[index]);
    }
    num_units_ = 0;
  }

  void copy_side_by_side() const {
    std::uint64_t from_src[kStreams];
    std::uint64_t from_dst[kStreams];
    for (int stream = 0; stream < kStreams; ++stream) {
      from_src[stream] = units_[stream].first.src - units_[0].first.src;
      from_dst[stream] = units_[stream].first.dst - units_[0].first.dst;
    }
    const std::uint64_t run_bytes = units_[0].run_bytes;
    for_each_run(units_[0], [&](const CopyRun& run) {
      for (std::uint64_t begin = 0; begin < run_bytes; begin += kStepBytes) {
        const std::uint64_t end = std::min(begin + kStepBytes, run_bytes);
        for (int stream = 0; stream < kStreams; ++stream) {
          const std::uint64_t src = run.src + from_src[stream];
          const std::uint64_t dst = run.dst + from_dst[stream];
          for (std::uint64_t at = begin; at < end; at += kLine) stream_line(dst + at, src + at);
        }
      }
    });
  }

  CopyUnit units_[kStreams];
  int num_units_ = 0;
};

void convert_unit(const CopyPlan& plan, const CopyUnit& unit) {
  for_each_run(unit, [&](const CopyRun& run) {
    convert_run(plan.conversion, pointer(run.dst), pointer(run.src), unit.run_bytes / 2,
                plan.inverse_scales[run.scale]);
  });
}

}  // namespace

void paged_copy_host(WorkerPool& pool, const CopyPlan& plan, bool bypass_cache) {
  const PlanUnits units(plan, OrderSide::kSource, pool.num_threads(), kMaxRunBytes);
  pool.run(units.total_work(), [&](std::uint64_t begin, std::uint64_t end) {
    if (plan.conversion != Conversion::kNone) {
      units.for_each_unit(begin, end, [&](const CopyUnit& unit) { convert_unit(plan, unit); });
    } else if (bypass_cache) {
      StreamingCopy copy;
      units.for_each_unit(begin, end, [&](const CopyUnit& unit) { copy.add(unit); });
      copy.finish();
    } else {
      units.for_each_unit(begin, end, copy_plain);
    }
  });
}

}  // namespace kvxfer
