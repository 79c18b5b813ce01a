#include "copy/paged_copy_host.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/error.hpp"

namespace kvxfer {

namespace {

// Pieces a thread should have, so that a plan of few large pages gives all threads work and the
// streaming copy several pages side by side.
constexpr std::uint64_t kPiecesPerThread = 4;
constexpr std::uint64_t kLine = 64;
// A cross-memory call moves at most INT_MAX bytes: a call is full at this many, and one more piece
// of this many still fits.
constexpr std::uint64_t kMaxPieceBytes = 1ull << 30;

struct Piece {
  std::uint64_t src;
  std::uint64_t dst;
  std::uint64_t num_bytes;
};

/// The pieces of a plan in the order of one side's addresses. Any order is right; this one lets the
/// prefetcher run on where neighbours in memory are both wanted, and lets their descriptors merge.
class OrderedPieces {
 public:
  OrderedPieces(const CopyPlan& plan, const std::uint64_t* sort_offsets, int num_threads)
      : plan_(plan), order_(plan.num_blocks) {
    const auto wanted = kPiecesPerThread * static_cast<std::uint64_t>(num_threads);
    const std::uint64_t cuts = plan.num_pages() >= wanted ? 1 : wanted;
    const std::uint64_t even = ((plan.page_bytes + cuts - 1) / cuts + kLine - 1) / kLine * kLine;
    piece_bytes_ = std::min(even, kMaxPieceBytes);
    per_page_ = (plan.page_bytes + piece_bytes_ - 1) / piece_bytes_;
    std::iota(order_.begin(), order_.end(), 0u);
    std::sort(order_.begin(), order_.end(), [sort_offsets](std::uint32_t a, std::uint32_t b) {
      return sort_offsets[a] < sort_offsets[b];
    });
  }

  [[nodiscard]] std::uint64_t size() const { return plan_.num_pages() * per_page_; }

  [[nodiscard]] Piece operator[](std::uint64_t index) const {
    const std::uint64_t page_index = index / per_page_;
    const std::uint64_t plane = page_index / plan_.num_blocks;
    const std::uint32_t block = order_[page_index - plane * plan_.num_blocks];
    const auto page = plan_.page(plane * plan_.num_blocks + block);
    const std::uint64_t begin = (index - page_index * per_page_) * piece_bytes_;
    return {page.src + begin, page.dst + begin, std::min(plan_.page_bytes - begin, piece_bytes_)};
  }

 private:
  const CopyPlan& plan_;
  std::uint64_t piece_bytes_;
  std::uint64_t per_page_;
  std::vector<std::uint32_t> order_;
};

void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

void copy_plain(const Piece& piece) {
  std::memcpy(pointer(piece.dst), pointer(piece.src), piece.num_bytes);
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
// KiB: the hardware prefetcher starts anew at each jump. Several pages side by side keep it busy.
constexpr int kStreams = 4;
constexpr std::uint64_t kStepBytes = 256;

void copy_streaming(const Piece& piece, std::uint64_t begin, std::uint64_t end) {
  for (std::uint64_t at = begin; at < end; at += kLine) stream_line(piece.dst + at, piece.src + at);
}

/// Whether a piece can be streamed line by line from its first byte to its last.
bool whole_lines(const Piece& piece) {
  return piece.dst % kLine == 0 && piece.num_bytes % kLine == 0;
}

/// Copies kStreams pieces side by side; they are of one size and of whole lines.
void copy_side_by_side(const Piece* pieces) {
  const std::uint64_t num_bytes = pieces[0].num_bytes;
  for (std::uint64_t at = 0; at < num_bytes; at += kStepBytes) {
    const std::uint64_t end = std::min(at + kStepBytes, num_bytes);
    for (int stream = 0; stream < kStreams; ++stream) copy_streaming(pieces[stream], at, end);
  }
}

void copy_slice_streaming(const OrderedPieces& all, std::uint64_t begin, std::uint64_t end) {
  Piece pieces[kStreams];
  std::uint64_t index = begin;
  for (; index + kStreams <= end; index += kStreams) {
    bool alike = true;
    for (int stream = 0; stream < kStreams; ++stream) {
      pieces[stream] = all[index + static_cast<std::uint64_t>(stream)];
      alike =
          alike && whole_lines(pieces[stream]) && pieces[stream].num_bytes == pieces[0].num_bytes;
    }
    if (alike) {
      copy_side_by_side(pieces);
      continue;
    }
    for (const Piece& piece : pieces) copy_plain(piece);
  }
  for (; index < end; ++index) copy_plain(all[index]);
  // Streaming stores are weakly ordered: without this fence a completion flag could overtake them.
  drain_streams();
}

// The kernel takes at most IOV_MAX (1024) entries on either side of a call.
constexpr std::size_t kMaxIovecs = 1024;

struct CrossMemoryBatch {
  std::vector<iovec> local;
  std::vector<iovec> remote;
  std::uint64_t num_bytes = 0;

  void add(const iovec& local_piece, const iovec& remote_piece) {
    append(local, local_piece);
    append(remote, remote_piece);
    num_bytes += local_piece.iov_len;
  }
  [[nodiscard]] bool full() const {
    return local.size() == kMaxIovecs || remote.size() == kMaxIovecs || num_bytes >= kMaxPieceBytes;
  }
  void clear() {
    local.clear();
    remote.clear();
    num_bytes = 0;
  }

 private:
  // The two lists are byte streams that need not be cut alike: each remote entry costs a lock and a
  // walk of the other process's page tables, so neighbours are joined.
  static void append(std::vector<iovec>& list, const iovec& piece) {
    if (!list.empty()) {
      iovec& last = list.back();
      if (static_cast<char*>(last.iov_base) + last.iov_len == piece.iov_base) {
        last.iov_len += piece.iov_len;
        return;
      }
    }
    list.push_back(piece);
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
      throw Error(
          ErrorKind::kNotAvailable,
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
  const OrderedPieces pieces(plan, plan.src_offsets, pool.num_threads());
  pool.run(pieces.size(), [&](std::uint64_t begin, std::uint64_t end) {
    if (bypass_cache) {
      copy_slice_streaming(pieces, begin, end);
      return;
    }
    for (std::uint64_t index = begin; index < end; ++index) copy_plain(pieces[index]);
  });
}

void paged_copy_process_vm(WorkerPool& pool, const CopyPlan& plan, int pid, RemoteSide remote) {
  const bool writes = remote == RemoteSide::kDestination;
  const OrderedPieces pieces(plan, writes ? plan.dst_offsets : plan.src_offsets,
                             pool.num_threads());
  pool.run(pieces.size(), [&](std::uint64_t begin, std::uint64_t end) {
    CrossMemoryBatch batch;
    for (std::uint64_t index = begin; index < end; ++index) {
      const Piece piece = pieces[index];
      const iovec src{pointer(piece.src), piece.num_bytes};
      const iovec dst{pointer(piece.dst), piece.num_bytes};
      batch.add(writes ? src : dst, writes ? dst : src);
      if (batch.full()) flush(batch, pid, remote);
    }
    flush(batch, pid, remote);
  });
}

}  // namespace kvxfer
