#include "ucx/link.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "core/check.hpp"
#include "core/worker_pool.hpp"
#include "ucx/pieces.hpp"

namespace kvxfer::ucx {

namespace {

constexpr auto kSpin = std::chrono::microseconds(50);
constexpr double kCloseS = 1;

Hello hello_of(const ServerAddress& server, std::uint64_t slot_bytes, bool needs_slots) {
  Hello hello{kWireVersion, server.slot, {}, slot_bytes, needs_slots};
  KVXFER_REQUIRE(server.secret.size() == hello.secret.size(), "a secret of another length than 16");
  std::memcpy(hello.secret.data(), server.secret.data(), hello.secret.size());
  return hello;
}

}  // namespace

class Link::State final : public Receiver {
 public:
  State(std::shared_ptr<Context> context, ServerAddress server, int num_threads,
        const Settings& settings)
      : server_(std::move(server)),
        settings_(settings),
        default_direct_bytes_(settings.direct_bytes),
        staging_(context, settings),
        num_threads_(num_threads),
        worker_(std::move(context), *this),
        channel_(std::make_unique<Channel>(worker_, server_.host, server_.port)),
        deadline_(after(settings.connect_s)) {
    channel_->send(Message::kHello,
                   hello_of(server_, staging_.slot_bytes(), needs_slots(settings)));
  }

  void start(Message message, SidePlan near, const SidePlan& far, std::uint64_t sequence,
             std::uint64_t direct_bytes, int num_sms);
  bool poll(double timeout_s);
  void close() noexcept;
  void on_message(Message message, ucp_ep_h from, std::span<const std::byte> header,
                  Arrival& arrival) noexcept override;

  void send_raw(Message message, const std::string& header, const std::string& data) {
    if (phase_ == Phase::kBroken) throw lost();
    const auto bytes = std::as_bytes(std::span<const char>(data));
    channel_->send_bytes(message, std::as_bytes(std::span<const char>(header)),
                         {bytes.begin(), bytes.end()});
    phase_ = Phase::kRaw;
    deadline_ = after(settings_.stall_s);
  }
  [[nodiscard]] std::uint64_t first_sequence() const { return welcome_.sequence; }
  [[nodiscard]] std::string transports() const {
    return channel_->handle() != nullptr ? channel_->transports() : "closed";
  }
  /// Whether UCX has nothing left of a closed link.
  [[nodiscard]] bool is_quiet() const { return channel_->is_closed(); }

 private:
  enum class Phase {
    kConnecting,
    kIdle,
    kAwaitingGo,
    kSending,
    kReceiving,
    kAwaitingDone,
    kRaw,
    kBroken
  };

  void handle(Message message, std::span<const std::byte> header, Arrival& arrival);
  void on_fail(const Fail& fail, const Arrival& arrival);
  void about(std::span<const std::byte> header) const;
  void require_phase(bool fits) const;
  bool advance();
  bool step();
  void require_moving();
  [[noreturn]] void give_up(const Error& error);
  [[nodiscard]] Error lost() const;

  ServerAddress server_;
  Settings settings_;
  std::uint64_t default_direct_bytes_;
  Staging staging_;
  int num_threads_;
  std::unique_ptr<WorkerPool> pool_;
  std::unique_ptr<SlotCopies> copies_;  // from the first transfer on
  Worker worker_;
  std::unique_ptr<Channel> channel_;
  Phase phase_ = Phase::kConnecting;
  Welcome welcome_{};
  std::uint64_t transfer_ = 0;
  std::optional<Incoming> incoming_;
  std::optional<Outgoing> outgoing_;
  std::optional<Error> refusal_;  // of the transfer, by the server; the link stands
  std::optional<Error> failure_;  // of the link
  bool is_done_ = false;
  std::uint64_t num_messages_ = 0;
  std::uint64_t num_seen_ = 0;
  Clock::time_point deadline_;
};

void Link::State::start(Message message, SidePlan near, const SidePlan& far, std::uint64_t sequence,
                        std::uint64_t direct_bytes, int num_sms) {
  if (phase_ == Phase::kBroken) throw lost();
  KVXFER_REQUIRE(phase_ == Phase::kIdle, "a transfer is under way; wait for its end");
  if (!copies_) {
    pool_ = std::make_unique<WorkerPool>(num_threads_);
    copies_ = make_copies(settings_, *pool_, staging_);
  }
  copies_->use_sms(num_sms == 0 ? settings_.num_sms : num_sms);
  if (direct_bytes == 0) direct_bytes = default_direct_bytes_;
  settings_.direct_bytes = direct_bytes;
  std::vector<std::byte> tables = encode(far);
  const Lane lane{worker_, *channel_, *pool_, staging_, *copies_, settings_};
  incoming_.reset();
  outgoing_.reset();
  refusal_.reset();
  is_done_ = false;
  ++transfer_;
  if (message == Message::kPut) {
    outgoing_.emplace(lane, transfer_, std::move(near),
                      PeerTakes{welcome_.slot_bytes, welcome_.needs_slots != 0});
    phase_ = Phase::kAwaitingGo;
  } else {
    incoming_.emplace(lane, transfer_, std::move(near));
    phase_ = Phase::kReceiving;
  }
  deadline_ = after(settings_.stall_s);
  channel_->send(message, Begin{transfer_, sequence, direct_bytes}, std::move(tables));
}

void Link::State::on_message(Message message, ucp_ep_h, std::span<const std::byte> header,
                             Arrival& arrival) noexcept {
  if (failure_) return;
  ++num_messages_;
  try {
    handle(message, header, arrival);
  } catch (const Error& error) {
    failure_ = error;
  } catch (const std::exception& error) {
    failure_ = Error(ErrorKind::kTransferFailed, error.what());
  }
}

void Link::State::require_phase(bool fits) const {
  if (!fits)
    throw Error(ErrorKind::kTransferFailed, server_.name + " sent a message that is not due");
}

void Link::State::about(std::span<const std::byte> header) const {
  require_phase(read_header<About>(header.data(), header.size()).transfer == transfer_);
}

void Link::State::handle(Message message, std::span<const std::byte> header, Arrival& arrival) {
  if (phase_ == Phase::kRaw && message != Message::kFail) {
    if (message == Message::kDone) phase_ = Phase::kIdle;
    return;
  }
  switch (message) {
    case Message::kWelcome:
      require_phase(phase_ == Phase::kConnecting);
      welcome_ = read_header<Welcome>(header.data(), header.size());
      require_phase(welcome_.slot_bytes >= 4096);
      phase_ = Phase::kIdle;
      return;
    case Message::kGo:
      require_phase(phase_ == Phase::kAwaitingGo);
      about(header);
      phase_ = Phase::kSending;
      return;
    case Message::kPiece:
      require_phase(phase_ == Phase::kReceiving);
      return incoming_->on_piece(read_header<Piece>(header.data(), header.size()), arrival);
    case Message::kDone:
      require_phase(phase_ == Phase::kSending || phase_ == Phase::kAwaitingDone);
      about(header);
      is_done_ = true;
      return;
    case Message::kFail:
      return on_fail(read_header<Fail>(header.data(), header.size()), arrival);
    default:
      require_phase(false);
  }
}

void Link::State::on_fail(const Fail& fail, const Arrival& arrival) {
  const std::size_t num_bytes =
      arrival.is_rendezvous() ? 0 : std::min<std::size_t>(arrival.num_bytes(), kMaxFailBytes);
  const auto* text = reinterpret_cast<const char*>(arrival.data().data());
  const Error error = read_fail(fail, num_bytes == 0 ? "refused" : std::string(text, num_bytes));
  if (fail.stands == 0) {
    failure_ = error;
    return;
  }
  require_phase(phase_ == Phase::kRaw || (phase_ != Phase::kConnecting && phase_ != Phase::kIdle &&
                                          fail.transfer == transfer_));
  refusal_ = error;
}

Error Link::State::lost() const {
  return {ErrorKind::kPeerLost,
          describe(channel_->status(), server_.name +
                                           " ended, or has closed the cache of this link; connect "
                                           "again once it serves another")};
}

/// Breaks the link, since nobody knows what is still written.
void Link::State::give_up(const Error& error) {
  close();
  throw error;
}

/// Throws once the server has neither taken nor sent anything for too long.
void Link::State::require_moving() {
  const std::uint64_t num_seen = num_messages_ + channel_->num_ended();
  if (num_seen != num_seen_) {
    num_seen_ = num_seen;
    if (phase_ != Phase::kConnecting) deadline_ = after(settings_.stall_s);
  }
  if (Clock::now() < deadline_) return;
  if (phase_ == Phase::kConnecting) {
    give_up(Error(ErrorKind::kPeerLost, server_.name + " does not answer at " + server_.host + ":" +
                                            std::to_string(server_.port) + " within " +
                                            std::to_string(settings_.connect_s) + " s"));
  }
  give_up(Error(ErrorKind::kTransferTimeout,
                "the transfer to " + server_.name + " has not moved for " +
                    std::to_string(settings_.stall_s) +
                    " s and was given up; keep both sides' pages and connect again"));
}

/// Moves the transfer on where that needs no message; false where it does.
bool Link::State::advance() {
  if (phase_ == Phase::kSending) {
    if (outgoing_->advance()) return true;
    if (is_done_ && outgoing_->is_sent()) phase_ = Phase::kIdle;
  } else if (phase_ == Phase::kReceiving) {
    if (incoming_->advance()) return true;
    if (!incoming_->is_complete()) return false;
    phase_ = Phase::kAwaitingDone;
    channel_->send(Message::kFinish, About{transfer_});
    return true;
  } else if (phase_ == Phase::kAwaitingDone && is_done_) {
    phase_ = Phase::kIdle;
  }
  return false;
}

/// One round of work; throws where the transfer, or the link, has ended.
bool Link::State::step() {
  bool busy = worker_.progress();
  if (refusal_ && channel_->num_in_flight() == 0) {
    phase_ = Phase::kIdle;
    const Error error = *std::exchange(refusal_, std::nullopt);
    throw error;
  }
  if (failure_) give_up(*failure_);
  if (channel_->status() != UCS_OK) give_up(lost());
  try {
    busy |= advance();
  } catch (const Error& error) {
    give_up(error);
  }
  require_moving();
  return busy;
}

bool Link::State::poll(double timeout_s) {
  const auto end = after(timeout_s);
  auto busy_until = Clock::now() + kSpin;
  while (phase_ != Phase::kIdle) {
    if (phase_ == Phase::kBroken) throw lost();
    const bool busy = step();
    if (phase_ == Phase::kIdle) break;
    const auto now = Clock::now();
    if (now >= end) return false;
    if (busy) {
      busy_until = now + kSpin;
    } else if (now > busy_until) {
      worker_.sleep(std::chrono::duration<double>(end - now).count());
    }
  }
  return true;
}

void Link::State::close() noexcept {
  if (phase_ == Phase::kBroken) return;
  phase_ = Phase::kBroken;
  if (incoming_) incoming_->discard();
  if (copies_) copies_->drain();
  channel_->close();
  const auto deadline = after(kCloseS);
  while (!channel_->is_closed() && Clock::now() < deadline) (void)worker_.progress();
  copies_.reset();
  pool_.reset();
}

Link::Link(std::shared_ptr<Context> context, ServerAddress server, int num_threads,
           const Settings& settings)
    : state_(
          std::make_unique<State>(std::move(context), std::move(server), num_threads, settings)) {}
Link::~Link() {
  state_->close();
  // What UCX may still write to is left to it, rather than waiting for ever.
  if (!state_->is_quiet()) (void)state_.release();
}
void Link::start_put(const CopyPlan& plan, std::uint64_t sequence, std::uint64_t direct_bytes,
                     int num_sms) {
  state_->start(Message::kPut, SidePlan::source(plan), SidePlan::destination(plan), sequence,
                direct_bytes, num_sms);
}
void Link::start_get(const CopyPlan& plan, std::uint64_t sequence, std::uint64_t direct_bytes,
                     int num_sms) {
  state_->start(Message::kGet, SidePlan::destination(plan), SidePlan::source(plan), sequence,
                direct_bytes, num_sms);
}
void Link::send_raw(unsigned message, const std::string& header, const std::string& data) {
  state_->send_raw(static_cast<Message>(message), header, data);
}
bool Link::poll(double timeout_s) { return state_->poll(timeout_s); }
std::uint64_t Link::first_sequence() const { return state_->first_sequence(); }
std::string Link::transports() const { return state_->transports(); }
bool Link::close() {
  state_->close();
  return state_->is_quiet();
}

}  // namespace kvxfer::ucx
