#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "copy/side_plan.hpp"
#include "core/error.hpp"

namespace kvxfer::ucx {

static_assert(std::endian::native == std::endian::little, "the wire is little-endian");

/// The active messages of a connection. C is the side that connected and posts, S the one that
/// serves its regions. One transfer at a time:
///
///   kHello C>S, kWelcome S>C                          once
///   kPut   C>S, kGo S>C, kPiece C>S ..., kDone S>C    the plan is S's side of it
///   kGet   C>S, kPiece S>C ..., kFinish C>S, kDone S>C
///   kFail  either way, instead of what was due
enum class Message : unsigned {
  kHello,
  kWelcome,
  kPut,
  kGet,
  kGo,
  kPiece,
  kFinish,
  kDone,
  kFail,
  kCount,
};

/// Version 2: a side whose pages UCX does not reach says so, and all pieces to it and from it pass
/// through slots.
constexpr std::uint32_t kWireVersion = 2;
using Secret = std::array<std::byte, 16>;

struct Hello {
  std::uint32_t version;
  std::uint32_t slot;  // of the server's board
  Secret secret;       // that the server's metadata carries
  std::uint64_t slot_bytes;
  std::uint64_t needs_slots;  // 1: every piece comes by rendezvous and fits a slot
};
struct Welcome {
  std::uint64_t sequence;     // of the last transfer on that slot of the board
  std::uint64_t slot_bytes;   // the largest piece of several rows that the server takes
  std::uint64_t needs_slots;  // as in Hello
};
/// Begins a transfer; the data is an encoded SidePlan.
struct Begin {
  std::uint64_t transfer;      // its number on this connection, repeated in all its messages
  std::uint64_t sequence;      // what the board says when it is complete
  std::uint64_t direct_bytes;  // how long a row is to travel by itself, see Settings
};
/// Go, Finish and Done.
struct About {
  std::uint64_t transfer;
};
/// The data of `num_rows` rows of a box; a piece of one row may hold a part of it.
struct Piece {
  std::uint64_t transfer;
  std::uint64_t first_row;
  std::uint64_t num_rows;
  std::uint64_t first_byte;  // within the row
  std::uint32_t box;
  std::uint32_t reserved;
};
/// The data is text.
struct Fail {
  std::uint64_t transfer;
  std::uint32_t kind;    // an ErrorKind
  std::uint32_t stands;  // 1: the transfer alone is refused; 0: the connection ends
};

constexpr std::uint64_t kMaxFailBytes = 1024;
constexpr std::uint64_t kMaxPlanBytes = 64 << 20;
constexpr std::uint64_t kMaxSlotBytes = 64 << 20;

/// The header as `T`; throws Error(kTransferFailed) where its length is another.
template <class T>
T read_header(const void* header, std::size_t num_bytes) {
  static_assert(std::is_trivially_copyable_v<T> && std::has_unique_object_representations_v<T>);
  if (num_bytes != sizeof(T)) {
    throw Error(ErrorKind::kTransferFailed, "a message header of " + std::to_string(num_bytes) +
                                                " bytes, not " + std::to_string(sizeof(T)) +
                                                "; both sides need one version of kvxfer");
  }
  T value;
  std::memcpy(&value, header, sizeof(T));
  return value;
}

/// The error that a Fail stands for; kinds that are unknown become kTransferFailed.
Error read_fail(const Fail& fail, std::string text);

std::vector<std::byte> encode(const SidePlan& plan);
/// The tables as they were sent, their counts checked against the bytes that came and nothing else:
/// call SidePlan::require_valid. Throws Error(kTransferFailed).
SidePlan decode(std::span<const std::byte> data);

}  // namespace kvxfer::ucx
