#pragma once

#include <deque>
#include <optional>
#include <vector>

#include "copy/side_plan.hpp"
#include "core/worker_pool.hpp"
#include "ucx/channel.hpp"
#include "ucx/slot_copies.hpp"
#include "ucx/staging.hpp"

namespace kvxfer::ucx {

/// What both ends of a transfer work with; outlives them.
struct Lane {
  Worker& worker;
  Channel& channel;
  WorkerPool& pool;
  Staging& staging;
  SlotCopies& copies;
  const Settings& settings;
};

/// What the other side takes.
struct PeerTakes {
  std::uint64_t slot_bytes;  // of a piece of several rows
  bool needs_slots;          // then of every piece
};

/// The sending end of a transfer: cuts the rows of a plan into pieces. Rows that are long go
/// straight from their place; others are gathered, as many as fit, into a slot.
class Outgoing {
 public:
  /// The plan is valid.
  Outgoing(const Lane& lane, std::uint64_t transfer, SidePlan plan, const PeerTakes& peer);

  /// Begins a piece or sends one, where that can be; false where this waits for the peer alone, or
  /// nothing is left.
  bool advance();
  /// Whether every piece was sent and its memory is free again.
  [[nodiscard]] bool is_sent() const {
    return box_ == plan_.boxes.size() && num_staged_ + num_direct_ == 0;
  }

 private:
  struct Filling {
    Piece piece;
    std::byte* slot;
    std::uint64_t num_bytes;
  };
  [[nodiscard]] bool goes_direct(const SidePlan::Box& box) const;
  void skip_finished_boxes();
  bool send_direct(const SidePlan::Box& box);
  bool gather(const SidePlan::Box& box);
  bool send_filled();
  [[nodiscard]] Piece next_piece(std::uint64_t num_rows) const;

  Lane lane_;
  std::uint64_t transfer_;
  SidePlan plan_;
  std::uint64_t slot_bytes_;
  bool needs_slots_;       // this side, or the peer
  bool peer_needs_slots_;  // and so fetches every piece
  std::deque<Filling> filling_;
  std::uint32_t num_staged_ = 0;  // slots that are filled or on their way
  std::uint32_t num_direct_ = 0;
  std::size_t box_ = 0;
  std::uint64_t row_ = 0;   // of the box
  std::uint64_t byte_ = 0;  // of the row
};

/// The receiving end: fetches pieces into their place or through a slot. Everything that a piece
/// says is checked against the plan, which is valid.
class Incoming {
 public:
  Incoming(const Lane& lane, std::uint64_t transfer, SidePlan plan);

  /// Takes a piece's data or queues it. Throws Error(kTransferFailed) for a piece that the plan
  /// does not have.
  void on_piece(const Piece& piece, Arrival& arrival);
  /// Fetches what was queued, or begins or ends to scatter what has arrived; false where this waits
  /// for the peer alone. Throws Error where data did not arrive.
  bool advance();
  /// Gives back to UCX what was announced and not fetched; before the channel is closed.
  void discard() { queued_.clear(); }
  /// Whether every byte of the plan is in its place.
  [[nodiscard]] bool is_complete() const { return num_placed_ == num_wanted_; }

 private:
  struct Slot {
    Piece piece;
    std::byte* data;
    std::uint64_t num_bytes;
  };
  struct Queued {
    Piece piece;
    Arrival arrival;
  };
  void require_in_plan(const Piece& piece, std::size_t num_bytes) const;
  void place(const Piece& piece, std::span<const std::byte> data);
  void scatter(const Slot& slot);
  bool end_scattered();
  void fetch(const Piece& piece, Arrival arrival);
  [[nodiscard]] std::byte* address_of(const Piece& piece) const;

  Lane lane_;
  std::uint64_t transfer_;
  SidePlan plan_;
  bool needs_slots_;
  std::uint64_t num_wanted_;
  std::uint64_t num_announced_ = 0;
  std::uint64_t num_placed_ = 0;
  ucs_status_t failure_ = UCS_OK;
  std::deque<Queued> queued_;
  std::deque<Slot> arrived_;
  std::deque<Slot> scattering_;
};

}  // namespace kvxfer::ucx
