#include "copy/paged_copy_host.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/error.hpp"

namespace kvxfer {

namespace {

// A page is handed to memcpy (or iovec) in one piece; a plan of few large pages is split so that all
// threads have work.
constexpr std::uint64_t kSplitBytes = 256 << 10;

std::uint64_t pieces_per_page(const CopyPlan& plan) {
  return plan.page_bytes <= kSplitBytes ? 1 : (plan.page_bytes + kSplitBytes - 1) / kSplitBytes;
}

struct Piece {
  std::uint64_t src;
  std::uint64_t dst;
  std::uint64_t num_bytes;
};

Piece piece_at(const CopyPlan& plan, std::uint64_t per_page, std::uint64_t index) {
  const std::uint64_t page_index = index / per_page;
  const std::uint64_t begin = (index - page_index * per_page) * kSplitBytes;
  const auto page = plan.page(page_index);
  const std::uint64_t left = plan.page_bytes - begin;
  return {page.src + begin, page.dst + begin, per_page == 1 ? left : std::min(left, kSplitBytes)};
}

void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

void copy_plain(const Piece& piece) {
  std::memcpy(pointer(piece.dst), pointer(piece.src), piece.num_bytes);
}

constexpr std::uint64_t kLine = 64;

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

// One stream of reads cannot fill a core's share of the memory bandwidth when it jumps every few KiB:
// the hardware prefetcher starts anew at each jump. Several pages side by side keep it busy.
constexpr int kStreams = 4;
constexpr std::uint64_t kStepBytes = 256;

void copy_streaming(const Piece& piece, std::uint64_t begin, std::uint64_t end) {
  for (std::uint64_t at = begin; at < end; at += kLine) stream_line(piece.dst + at, piece.src + at);
}

/// Whether a piece can be streamed line by line from its first byte to its last.
bool whole_lines(const Piece& piece) { return piece.dst % kLine == 0 && piece.num_bytes % kLine == 0; }

/// Copies kStreams pieces side by side; they are of one size and of whole lines.
void copy_side_by_side(const Piece* pieces) {
  const std::uint64_t num_bytes = pieces[0].num_bytes;
  for (std::uint64_t at = 0; at < num_bytes; at += kStepBytes) {
    const std::uint64_t end = std::min(at + kStepBytes, num_bytes);
    for (int stream = 0; stream < kStreams; ++stream) copy_streaming(pieces[stream], at, end);
  }
}

void copy_slice_streaming(const CopyPlan& plan, std::uint64_t per_page, std::uint64_t begin,
                          std::uint64_t end) {
  Piece pieces[kStreams];
  std::uint64_t index = begin;
  for (; index + kStreams <= end; index += kStreams) {
    bool alike = true;
    for (int stream = 0; stream < kStreams; ++stream) {
      pieces[stream] = piece_at(plan, per_page, index + static_cast<std::uint64_t>(stream));
      alike = alike && whole_lines(pieces[stream]) &&
              pieces[stream].num_bytes == pieces[0].num_bytes;
    }
    if (alike) {
      copy_side_by_side(pieces);
      continue;
    }
    for (const Piece& piece : pieces) copy_plain(piece);
  }
  for (; index < end; ++index) copy_plain(piece_at(plan, per_page, index));
  // Streaming stores are weakly ordered: without this fence a completion flag could overtake them.
  drain_streams();
}

// The kernel takes at most IOV_MAX (1024) pieces a call and moves at most INT_MAX bytes.
constexpr std::size_t kMaxIovecs = 1024;
constexpr std::uint64_t kMaxCallBytes = 1ull << 30;

struct CrossMemoryBatch {
  std::vector<iovec> local;
  std::vector<iovec> remote;
  std::uint64_t num_bytes = 0;

  void add(iovec local_piece, iovec remote_piece) {
    local.push_back(local_piece);
    remote.push_back(remote_piece);
    num_bytes += local_piece.iov_len;
  }
  [[nodiscard]] bool full() const { return local.size() == kMaxIovecs || num_bytes >= kMaxCallBytes; }
  void clear() {
    local.clear();
    remote.clear();
    num_bytes = 0;
  }
};

[[noreturn]] void throw_cross_memory(int pid, RemoteSide remote, std::uint64_t moved,
                                     std::uint64_t wanted, int error_number) {
  const char* call = remote == RemoteSide::kDestination ? "process_vm_writev" : "process_vm_readv";
  const std::string what = std::string(call) + " with process " + std::to_string(pid) + " moved " +
                           std::to_string(moved) + " of " + std::to_string(wanted) + " bytes";
  switch (error_number) {
    case ESRCH:
      throw Error(ErrorKind::kPeerLost, what + ": the process is gone", error_number);
    case EPERM:
      throw Error(ErrorKind::kNotAvailable,
                  what +
                      ": the kernel denies access to its memory; run both as one user, allow it with "
                      "prctl(PR_SET_PTRACER) or kernel.yama.ptrace_scope=0, or put the pages in a "
                      "shared segment",
                  error_number);
    default:
      throw_errno(ErrorKind::kTransferFailed, what, error_number);
  }
}

void flush(CrossMemoryBatch& batch, int pid, RemoteSide remote) {
  if (batch.local.empty()) return;
  const auto call = remote == RemoteSide::kDestination ? process_vm_writev : process_vm_readv;
  const ssize_t moved = call(pid, batch.local.data(), batch.local.size(), batch.remote.data(),
                             batch.remote.size(), 0);
  if (moved < 0 || static_cast<std::uint64_t>(moved) != batch.num_bytes) {
    // A short count without an error means that the kernel met an unmapped address part-way.
    throw_cross_memory(pid, remote, moved < 0 ? 0 : static_cast<std::uint64_t>(moved),
                       batch.num_bytes, moved < 0 ? errno : EFAULT);
  }
  batch.clear();
}

}  // namespace

void paged_copy_host(WorkerPool& pool, const CopyPlan& plan, bool bypass_cache) {
  const std::uint64_t per_page = pieces_per_page(plan);
  pool.run(plan.num_pages() * per_page, [&](std::uint64_t begin, std::uint64_t end) {
    if (bypass_cache) {
      copy_slice_streaming(plan, per_page, begin, end);
      return;
    }
    for (std::uint64_t index = begin; index < end; ++index) {
      copy_plain(piece_at(plan, per_page, index));
    }
  });
}

void paged_copy_process_vm(WorkerPool& pool, const CopyPlan& plan, int pid, RemoteSide remote) {
  const std::uint64_t per_page = pieces_per_page(plan);
  pool.run(plan.num_pages() * per_page, [&](std::uint64_t begin, std::uint64_t end) {
    CrossMemoryBatch batch;
    for (std::uint64_t index = begin; index < end; ++index) {
      const Piece piece = piece_at(plan, per_page, index);
      const iovec src{pointer(piece.src), piece.num_bytes};
      const iovec dst{pointer(piece.dst), piece.num_bytes};
      if (remote == RemoteSide::kDestination) {
        batch.add(src, dst);
      } else {
        batch.add(dst, src);
      }
      if (batch.full()) flush(batch, pid, remote);
    }
    flush(batch, pid, remote);
  });
}

}  // namespace kvxfer
