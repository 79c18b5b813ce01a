#include "ucx/pieces.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvxfer::ucx {

namespace {

// A sender has no more than its own slots on the way; this only bounds one that lies.
constexpr std::size_t kMaxQueued = 256;

}  // namespace

Outgoing::Outgoing(const Lane& lane, std::uint64_t transfer, SidePlan plan, const PeerTakes& peer)
    : lane_(lane),
      transfer_(transfer),
      plan_(std::move(plan)),
      slot_bytes_(std::min(peer.slot_bytes, lane.staging.slot_bytes())),
      needs_slots_(peer.needs_slots || needs_slots(lane.settings)),
      peer_needs_slots_(peer.needs_slots) {
  skip_finished_boxes();
}

void Outgoing::skip_finished_boxes() {
  while (box_ < plan_.boxes.size() && row_ >= plan_.boxes[box_].num_rows()) {
    ++box_;
    row_ = 0;
  }
}

bool Outgoing::goes_direct(const SidePlan::Box& box) const {
  return !needs_slots_ && plan_.conversion == Conversion::kNone &&
         box.run_bytes >= lane_.settings.direct_bytes;
}

bool Outgoing::advance() {
  bool moved = false;
  if (box_ < plan_.boxes.size()) {
    const SidePlan::Box& box = plan_.boxes[box_];
    moved = goes_direct(box) ? send_direct(box) : gather(box);
    skip_finished_boxes();
  }
  moved |= send_filled();
  return moved || !filling_.empty();
}

Piece Outgoing::next_piece(std::uint64_t num_rows) const {
  return {transfer_, row_, num_rows, byte_, static_cast<std::uint32_t>(box_), 0};
}

bool Outgoing::send_direct(const SidePlan::Box& box) {
  if (num_direct_ == lane_.settings.num_direct) return false;
  const std::uint64_t address = plan_.run(box, row_).address + byte_;
  const std::uint64_t num_bytes = std::min(box.run_bytes - byte_, lane_.settings.max_direct_bytes);
  const Piece piece = next_piece(1);
  byte_ += num_bytes;
  if (byte_ == box.run_bytes) {
    byte_ = 0;
    ++row_;
  }
  ++num_direct_;
  const std::shared_ptr<Memory> memory = lane_.worker.context().find(address, num_bytes);
  lane_.channel.send_piece(piece, {reinterpret_cast<const std::byte*>(address), num_bytes},
                           memory.get(), peer_needs_slots_,
                           [this, memory](ucs_status_t) { --num_direct_; });
  return true;
}

bool Outgoing::gather(const SidePlan::Box& box) {
  if (!lane_.staging.has_free()) return false;
  const std::uint64_t wire_run = plan_.wire_run_bytes(box);
  const bool is_part = wire_run > slot_bytes_;  // of a row
  const std::uint64_t num_rows =
      is_part ? 1 : std::min(slot_bytes_ / wire_run, box.num_rows() - row_);
  const std::uint64_t row_bytes = is_part ? std::min(wire_run - byte_, slot_bytes_) : wire_run;
  const Piece piece = next_piece(num_rows);
  std::byte* slot = lane_.staging.take();
  ++num_staged_;
  filling_.push_back({piece, slot, num_rows * row_bytes});
  lane_.copies.gather(plan_, box, {row_, num_rows, byte_, row_bytes}, slot);
  byte_ += row_bytes;
  if (byte_ == wire_run) {
    byte_ = 0;
    row_ += num_rows;
  }
  return true;
}

/// Sends the slot that was begun first, once it is filled.
bool Outgoing::send_filled() {
  if (filling_.empty() || !lane_.copies.is_done(filling_.front().slot)) return false;
  const Filling filled = filling_.front();
  filling_.pop_front();
  lane_.channel.send_piece(filled.piece, {filled.slot, filled.num_bytes}, lane_.staging.memory(),
                           peer_needs_slots_, [this, slot = filled.slot](ucs_status_t) {
                             lane_.staging.give_back(slot);
                             --num_staged_;
                           });
  return true;
}

Incoming::Incoming(const Lane& lane, std::uint64_t transfer, SidePlan plan)
    : lane_(lane),
      transfer_(transfer),
      plan_(std::move(plan)),
      needs_slots_(needs_slots(lane.settings)),
      num_wanted_(plan_.wire_bytes()) {}

void Incoming::require_in_plan(const Piece& piece, std::size_t num_bytes) const {
  const auto fail = [](const std::string& what) {
    throw Error(ErrorKind::kTransferFailed, "the peer sent a piece " + what);
  };
  if (piece.transfer != transfer_) fail("of transfer " + std::to_string(piece.transfer));
  if (piece.box >= plan_.boxes.size()) fail("of box " + std::to_string(piece.box));
  const SidePlan::Box& box = plan_.boxes[piece.box];
  const std::uint64_t num_rows = box.num_rows();
  if (piece.num_rows == 0 || piece.first_row >= num_rows ||
      piece.num_rows > num_rows - piece.first_row) {
    fail("of rows outside its box");
  }
  if (piece.num_rows == 1) {
    if (piece.first_byte >= box.run_bytes || num_bytes > box.run_bytes - piece.first_byte) {
      fail("of bytes outside its row");
    }
  } else if (piece.first_byte != 0 || num_bytes > lane_.staging.slot_bytes() ||
             num_bytes / box.run_bytes != piece.num_rows || num_bytes % box.run_bytes != 0) {
    fail("of " + std::to_string(num_bytes) + " bytes for " + std::to_string(piece.num_rows) +
         " rows");
  }
  if (num_bytes == 0 || num_bytes > num_wanted_ - num_announced_) fail("too many");
  if (needs_slots_ && num_bytes > lane_.staging.slot_bytes()) fail("that is longer than a slot");
}

void Incoming::on_piece(const Piece& piece, Arrival& arrival) {
  const std::size_t num_bytes = arrival.num_bytes();
  require_in_plan(piece, num_bytes);
  num_announced_ += num_bytes;
  if (!arrival.is_rendezvous()) {
    place(piece, arrival.data());
  } else if ((piece.num_rows == 1 && !needs_slots_) ||
             (queued_.empty() && lane_.staging.has_free())) {
    fetch(piece, arrival.keep());
  } else if (queued_.size() < kMaxQueued) {
    queued_.push_back({piece, arrival.keep()});
  } else {
    throw Error(ErrorKind::kTransferFailed, "the peer has sent " + std::to_string(kMaxQueued) +
                                                " pieces ahead of what was fetched");
  }
}

std::byte* Incoming::address_of(const Piece& piece) const {
  const SidePlan::Run run = plan_.run(plan_.boxes[piece.box], piece.first_row);
  return reinterpret_cast<std::byte*>(run.address + piece.first_byte);
}

/// Puts eager data where it belongs.
void Incoming::place(const Piece& piece, std::span<const std::byte> data) {
  if (needs_slots_) {
    throw Error(ErrorKind::kTransferFailed, "the peer sent a piece that cannot be fetched");
  }
  if (piece.num_rows == 1) {
    std::memcpy(address_of(piece), data.data(), data.size());
  } else {
    plan_.scatter(lane_.pool, plan_.boxes[piece.box], piece.first_row, piece.num_rows, data.data());
  }
  num_placed_ += data.size();
}

void Incoming::fetch(const Piece& piece, Arrival arrival) {
  const std::size_t num_bytes = arrival.num_bytes();
  if (piece.num_rows == 1 && !needs_slots_) {
    std::byte* address = address_of(piece);
    const std::shared_ptr<Memory> memory =
        lane_.worker.context().find(reinterpret_cast<std::uint64_t>(address), num_bytes);
    lane_.channel.fetch(std::move(arrival), {address, num_bytes}, memory.get(),
                        [this, num_bytes, memory](ucs_status_t status) {
                          if (status == UCS_OK)
                            num_placed_ += num_bytes;
                          else
                            failure_ = status;
                        });
    return;
  }
  std::byte* slot = lane_.staging.take();
  lane_.channel.fetch(std::move(arrival), {slot, num_bytes}, lane_.staging.memory(),
                      [this, piece, slot, num_bytes](ucs_status_t status) {
                        if (status == UCS_OK) {
                          arrived_.push_back({piece, slot, num_bytes});
                        } else {
                          lane_.staging.give_back(slot);
                          failure_ = status;
                        }
                      });
}

bool Incoming::advance() {
  if (failure_ != UCS_OK) check(failure_, "fetching a piece");
  if (!queued_.empty() && lane_.staging.has_free()) {
    Queued next = std::move(queued_.front());
    queued_.pop_front();
    fetch(next.piece, std::move(next.arrival));
    return true;
  }
  if (!arrived_.empty()) {
    const Slot slot = arrived_.front();
    arrived_.pop_front();
    scatter(slot);
    (void)end_scattered();
    return true;
  }
  return end_scattered() || !scattering_.empty();
}

void Incoming::scatter(const Slot& slot) {
  const Piece& piece = slot.piece;
  scattering_.push_back(slot);
  lane_.copies.scatter(
      plan_, plan_.boxes[piece.box],
      {piece.first_row, piece.num_rows, piece.first_byte, slot.num_bytes / piece.num_rows},
      slot.data);
}

/// Frees the slot whose scatter was begun first, once it is empty.
bool Incoming::end_scattered() {
  if (scattering_.empty() || !lane_.copies.is_done(scattering_.front().data)) return false;
  num_placed_ += scattering_.front().num_bytes;
  lane_.staging.give_back(scattering_.front().data);
  scattering_.pop_front();
  return true;
}

}  // namespace kvxfer::ucx
