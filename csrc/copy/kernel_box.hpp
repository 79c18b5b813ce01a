#pragma once

#include <cstdint>
#include <type_traits>

#include "copy/copy_plan.hpp"

namespace kvxfer {

/// Division by a number that is known at the launch, as a multiplication: exact for numerators
/// below 2^31. (Granlund, Montgomery: Division by invariant integers using multiplication, 1994.)
struct Divider {
  std::uint32_t divisor;
  std::uint32_t magic;
  std::uint32_t shift;

  /// `divisor` is 1 to 2^31.
  static Divider of(std::uint32_t divisor) {
    std::uint32_t bits = 0;
    while ((1ull << bits) < divisor) ++bits;
    const std::uint32_t shift = 31 + bits;
    return {divisor, static_cast<std::uint32_t>((1ull << shift) / divisor + 1), shift};
  }
  KVXFER_HOST_DEVICE std::uint32_t quotient(std::uint32_t numerator) const {
    return static_cast<std::uint32_t>((static_cast<std::uint64_t>(numerator) * magic) >> shift);
  }
  /// Divides in place and returns the remainder.
  KVXFER_HOST_DEVICE std::uint32_t split(std::uint32_t& numerator) const {
    const std::uint32_t whole = quotient(numerator);
    const std::uint32_t rest = numerator - whole * divisor;
    numerator = whole;
    return rest;
  }
};

/// A box as kernels walk it: its runs are cut into pieces (the last of a run may be shorter), and
/// neighbouring pieces make up a group, which a warp moves together, one lane a piece.
struct KernelBox {
  CopyBox box;
  std::uint32_t first_group;
  std::uint32_t num_pieces;
  std::uint32_t pieces_per_group;
  std::uint32_t piece_bytes;
  Divider pieces_per_run;
  Divider rows;
  Divider inner_rows;
  Divider segments;
  Divider piece;  // finds the piece that a byte of a group belongs to
  std::uint32_t unused;

  struct Place {
    std::uint32_t plane;
    std::uint32_t segment;
    std::uint32_t outer;
    std::uint32_t inner;
    std::uint32_t chunk;
  };

  /// Which piece `index` is, counted within the box.
  KVXFER_HOST_DEVICE Place place(std::uint32_t index) const {
    Place at;
    at.chunk = pieces_per_run.split(index);
    at.inner = rows.split(index);
    at.segment = segments.split(index);
    at.plane = index;
    at.outer = at.inner;
    at.inner = inner_rows.split(at.outer);
    return at;
  }
};

static_assert(sizeof(KernelBox) % 16 == 0, "tables of boxes stay aligned");
static_assert(std::is_trivially_copyable_v<KernelBox>, "tables are copied as bytes");

}  // namespace kvxfer
