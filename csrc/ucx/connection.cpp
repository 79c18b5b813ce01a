#include "ucx/connection.hpp"

#include <algorithm>

#include "core/check.hpp"

namespace kvxfer::ucx {

namespace {

// How long a peer that is told why it is dropped has to hear it.
constexpr double kLeaveS = 1;
// A plan's tables are looked through once a box; boxes that share large tables would multiply that.
constexpr std::uint64_t kMaxLookUps = 1ull << 26;
constexpr std::size_t kMaxInFlight = 1024;

void require_few_look_ups(const SidePlan& plan, std::size_t num_regions) {
  std::uint64_t look_ups = 0;
  for (const SidePlan::Box& box : plan.boxes) {
    look_ups += box.num_segments + std::uint64_t{box.num_planes} * num_regions;
  }
  KVXFER_REQUIRE(look_ups <= kMaxLookUps, "a plan of " + std::to_string(plan.boxes.size()) +
                                              " boxes over large tables; post it in parts");
}

}  // namespace

Connection::Connection(Host& host, Worker& worker, ucp_conn_request_h request)
    : host_(host),
      worker_(worker),
      staging_(worker.context().shared_from_this(), host.settings()),
      channel_(worker, request),
      settings_(host.settings()),
      deadline_(after(host.settings().connect_s)) {}

Connection::~Connection() {
  if (slot_) host_.close_slot(*slot_);
}

void Connection::on_message(Message message, std::span<const std::byte> header,
                            Arrival& arrival) noexcept {
  if (state_ == State::kLeaving || state_ == State::kDropped) return;
  ++num_messages_;
  try {
    handle(message, header, arrival);
  } catch (const Error& error) {
    fail(error);
  } catch (const std::exception& error) {
    fail(Error(ErrorKind::kTransferFailed, error.what()));
  }
}

void Connection::require_state(bool fits, Message message) const {
  if (fits) return;
  throw Error(ErrorKind::kTransferFailed,
              "message " + std::to_string(static_cast<unsigned>(message)) + " is not due");
}

void Connection::handle(Message message, std::span<const std::byte> header, Arrival& arrival) {
  switch (message) {
    case Message::kHello:
      require_state(state_ == State::kNew, message);
      return on_hello(read_header<Hello>(header.data(), header.size()));
    case Message::kPut:
    case Message::kGet:
      require_state(state_ == State::kIdle, message);
      return begin(message, read_header<Begin>(header.data(), header.size()), arrival);
    case Message::kPiece:
      require_state(state_ == State::kReceiving && channel_.num_in_flight() < kMaxInFlight,
                    message);
      return incoming_->on_piece(read_header<Piece>(header.data(), header.size()), arrival);
    case Message::kFinish:
      require_state(
          state_ == State::kSending &&
              read_header<About>(header.data(), header.size()).transfer == transfer_.transfer,
          message);
      peer_has_all_ = true;  // UCX may yet have to say so of the last pieces
      return;
    default:
      require_state(false, message);
  }
}

void Connection::on_hello(const Hello& hello) {
  if (hello.version != kWireVersion) {
    throw Error(ErrorKind::kNotAvailable,
                "the peer speaks version " + std::to_string(hello.version) + ", this side " +
                    std::to_string(kWireVersion) + "; both sides need one version of kvxfer");
  }
  unsigned difference = 0;  // in constant time, so that no byte of it can be guessed by itself
  for (std::size_t at = 0; at < hello.secret.size(); ++at) {
    difference |= static_cast<unsigned>(hello.secret[at] ^ host_.secret()[at]);
  }
  if (difference != 0) {
    throw Error(ErrorKind::kPeerLost,
                "what is served here is not what the metadata was made for; "
                "connect again");
  }
  if (hello.slot_bytes < 4096) throw Error(ErrorKind::kTransferFailed, "slots below 4 KiB");
  peer_ = {hello.slot_bytes, hello.needs_slots != 0};
  const std::uint64_t sequence = host_.open_slot(hello.slot);
  slot_ = hello.slot;
  state_ = State::kIdle;
  channel_.send(Message::kWelcome,
                Welcome{sequence, staging_.slot_bytes(), needs_slots(settings_)});
}

/// A transfer that cannot be is refused and the connection stands; what it has is untouched.
void Connection::begin(Message message, const Begin& begin, Arrival& arrival) {
  transfer_ = begin;
  try {
    host_.require_standing();
    if (arrival.is_rendezvous() || arrival.num_bytes() > kMaxPlanBytes) {
      throw Error(ErrorKind::kTransferFailed,
                  "a plan of " + std::to_string(arrival.num_bytes()) + " bytes");
    }
    SidePlan plan = decode(arrival.data());
    const std::vector<Region> regions = host_.regions();
    require_few_look_ups(plan, regions.size());
    plan.require_valid(regions);
    if (!copies_) copies_ = make_copies(settings_, host_.pool(), staging_);
    const Lane lane{worker_, channel_, host_.pool(), staging_, *copies_, settings_};
    deadline_ = after(settings_.stall_s);
    if (message == Message::kGet) {
      settings_.direct_bytes = std::max<std::uint64_t>(begin.direct_bytes, 1);
      peer_has_all_ = false;
      outgoing_.emplace(lane, begin.transfer, std::move(plan), peer_);
      state_ = State::kSending;
    } else {
      KVXFER_REQUIRE(plan.conversion == Conversion::kNone, "a put converts where it is read");
      incoming_.emplace(lane, begin.transfer, std::move(plan));
      state_ = State::kReceiving;
      channel_.send(Message::kGo, About{begin.transfer});
    }
  } catch (const Error& error) {
    send_fail(error, true);
  }
}

/// All bytes are in place: only now may anybody be told.
void Connection::finish() {
  host_.signal(*slot_, transfer_.sequence);
  incoming_.reset();
  outgoing_.reset();
  state_ = State::kIdle;
  channel_.send(Message::kDone, About{transfer_.transfer});
}

bool Connection::advance() noexcept {
  try {
    if (state_ == State::kDropped) return false;
    if (channel_.status() != UCS_OK) {
      drop();
      return true;
    }
    const bool moved = move_on();
    require_live();
    return moved;
  } catch (const Error& error) {
    fail(error);
  } catch (const std::exception& error) {
    fail(Error(ErrorKind::kTransferFailed, error.what()));
  }
  return true;
}

bool Connection::move_on() {
  if (state_ == State::kReceiving) {
    const bool moved = incoming_->advance();
    if (!incoming_->is_complete()) return moved;
    finish();
    return true;
  }
  if (state_ == State::kSending) {
    const bool moved = outgoing_->advance();
    if (!peer_has_all_ || !outgoing_->is_sent()) return moved;
    finish();
    return true;
  }
  return false;
}

/// Throws once the peer has neither taken nor sent anything for too long.
void Connection::require_live() {
  const std::uint64_t num_seen = num_messages_ + channel_.num_ended();
  if (num_seen != num_seen_) {
    num_seen_ = num_seen;
    if (state_ != State::kNew && state_ != State::kLeaving) deadline_ = after(settings_.stall_s);
  }
  if (state_ == State::kIdle || Clock::now() < deadline_) return;
  if (state_ == State::kLeaving || state_ == State::kNew) return drop();
  throw Error(ErrorKind::kTransferTimeout,
              "the transfer has not moved for " + std::to_string(settings_.stall_s) + " s");
}

void Connection::send_fail(const Error& error, bool stands) {
  std::string text = error.what();
  text.resize(std::min<std::size_t>(text.size(), kMaxFailBytes));
  const auto bytes = std::as_bytes(std::span<const char>(text));
  channel_.send(
      Message::kFail,
      Fail{transfer_.transfer, static_cast<std::uint32_t>(error.kind()), stands ? 1u : 0u},
      {bytes.begin(), bytes.end()});
}

/// Tells the peer, once none of its transfer's copies touches a page any more.
void Connection::fail(const Error& error) noexcept {
  if (state_ == State::kLeaving || state_ == State::kDropped) return;
  state_ = State::kLeaving;
  deadline_ = after(kLeaveS);
  if (incoming_) incoming_->discard();
  if (copies_) copies_->drain();
  try {
    // The peer's own GPU, if it has one, is sound.
    const bool is_gpu = error.kind() == ErrorKind::kCuda;
    send_fail(is_gpu ? Error(ErrorKind::kTransferFailed, error.what()) : error, false);
  } catch (const std::exception&) {
    drop();
  }
}

void Connection::drop() {
  if (state_ == State::kDropped) return;
  state_ = State::kDropped;
  if (incoming_) incoming_->discard();
  if (copies_) copies_->drain();
  channel_.close();
}

}  // namespace kvxfer::ucx
