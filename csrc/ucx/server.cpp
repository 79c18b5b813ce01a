#include "ucx/server.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "core/check.hpp"
#include "memory/process.hpp"
#include "transport/completion_board.hpp"
#include "ucx/address.hpp"
#include "ucx/connection.hpp"

namespace kvxfer::ucx {

namespace {

constexpr std::size_t kMaxConnections = 128;
// A peer's next message mostly comes within this; a sleep costs a system call and a wake-up.
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr double kSleepS = 0.1;
constexpr double kCloseS = 2;

Secret to_secret(const std::string& bytes) {
  Secret secret{};
  KVXFER_REQUIRE(bytes.size() == secret.size(),
                 "a secret of " + std::to_string(bytes.size()) + " bytes; use 16");
  std::memcpy(secret.data(), bytes.data(), secret.size());
  return secret;
}

/// The words behind a slot's number, by which the board tells a slot in use from one left behind.
std::uint64_t* identity_words(const CompletionBoard& board, std::uint32_t slot) {
  return reinterpret_cast<std::uint64_t*>(board.slot_address(slot)) + 1;
}

/// In place of a process: whoever had the slot is gone (kvxfer/transport/board.py).
constexpr std::uint64_t kParted = ~std::uint64_t{0};

}  // namespace

class Server::State final : public Receiver, public Host {
 public:
  State(std::shared_ptr<Context> context, const std::string& host, const std::string& secret,
        const ServedBoard& board, int num_threads, const Settings& settings)
      : secret_(to_secret(secret)),
        served_(board),
        board_(board.address, std::max(board.num_slots, board.withdrawn_slot + 1)),
        num_threads_(num_threads),
        settings_(settings),
        num_users_(board.num_slots, 0),
        worker_(std::move(context), *this) {
    listen(host);
    thread_ = std::thread([this] { run(); });
  }
  ~State() override { (void)close(); }

  bool close() {
    if (thread_.joinable()) {
      stop_.store(true);
      worker_.wake();
      thread_.join();
    }
    return quiet_;
  }

  void add_region(const Region& region) {
    const std::lock_guard lock(mutex_);
    regions_.push_back(region);
  }
  [[nodiscard]] std::uint16_t port() const { return port_; }
  [[nodiscard]] std::size_t num_connections() const { return num_connections_.load(); }

  // What connections ask for, in the server's thread.
  const Secret& secret() const override { return secret_; }
  const Settings& settings() const override { return settings_; }
  std::vector<Region> regions() const override {
    const std::lock_guard lock(mutex_);
    return regions_;
  }
  WorkerPool& pool() override {
    if (!pool_) pool_ = std::make_unique<WorkerPool>(num_threads_);
    return *pool_;
  }
  std::uint64_t open_slot(std::uint32_t slot) override;
  void close_slot(std::uint32_t slot) override;
  void require_standing() const override {
    if (board_.load(served_.withdrawn_slot) == 0) return;
    throw Error(ErrorKind::kPeerLost,
                "process " + std::to_string(::getpid()) +
                    " has closed the cache of this link; connect again once it serves another");
  }
  void signal(std::uint32_t slot, std::uint64_t sequence) override {
    board_.signal(slot, sequence);
  }

  void on_message(Message message, ucp_ep_h from, std::span<const std::byte> header,
                  Arrival& arrival) noexcept override {
    const auto found = std::find_if(connections_.begin(), connections_.end(),
                                    [from](const auto& one) { return one->handle() == from; });
    if (from != nullptr && found != connections_.end()) {
      (*found)->on_message(message, header, arrival);
    }
  }

 private:
  void listen(const std::string& host);
  void run() noexcept;
  bool accept_requests();
  bool advance_connections();
  void close_connections() noexcept;

  Secret secret_;
  ServedBoard served_;
  CompletionBoard board_;
  int num_threads_;
  Settings settings_;
  std::vector<std::uint32_t> num_users_;  // of each slot
  mutable std::mutex mutex_;
  std::vector<Region> regions_;
  std::unique_ptr<WorkerPool> pool_;
  Worker worker_;
  ucp_listener_h listener_ = nullptr;
  std::uint16_t port_ = 0;
  std::deque<ucp_conn_request_h> requests_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::atomic<std::size_t> num_connections_{0};
  std::atomic<bool> stop_{false};
  bool quiet_ = true;
  std::thread thread_;
};

void Server::State::listen(const std::string& host) {
  const SocketAddress address(host, 0);
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr.addr = address.get();
  params.sockaddr.addrlen = address.num_bytes();
  params.conn_handler.cb = [](ucp_conn_request_h request, void* state) {
    static_cast<State*>(state)->requests_.push_back(request);
  };
  params.conn_handler.arg = this;
  const ucs_status_t status =
      worker_.lib().ucp_listener_create(worker_.handle(), &params, &listener_);
  if (status != UCS_OK) {
    throw Error(ErrorKind::kNotAvailable, describe(status, "UCX cannot listen on " + host), status);
  }
  ucp_listener_attr_t attr{};
  attr.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  check(worker_.lib().ucp_listener_query(listener_, &attr), "ucp_listener_query");
  port_ = port_of(attr.sockaddr);
}

std::uint64_t Server::State::open_slot(std::uint32_t slot) {
  if (slot >= served_.num_slots) {
    throw Error(ErrorKind::kTransferFailed, "completion slot " + std::to_string(slot) +
                                                " of a board of " +
                                                std::to_string(served_.num_slots));
  }
  if (num_users_[slot]++ == 0) {
    // A peer on another host has no process that the board could look for. Its slot is this
    // process's for as long as it is connected.
    const ProcessIdentity own = process_identity(0);
    std::uint64_t* words = identity_words(board_, slot);
    words[0] = static_cast<std::uint64_t>(own.pid);
    words[1] = own.start_ticks;
    words[2] = own.pid_namespace;
  }
  return board_.load(slot);
}

void Server::State::close_slot(std::uint32_t slot) {
  if (--num_users_[slot] != 0) return;
  // Its endpoint is closed and its receives are over, so that nothing can be stored any more.
  std::uint64_t* words = identity_words(board_, slot);
  words[0] = kParted;
  words[1] = words[2] = 0;
}

void Server::State::run() noexcept {
  auto busy_until = Clock::now();
  while (!stop_.load()) {
    bool busy = worker_.progress();
    busy |= accept_requests();
    busy |= advance_connections();
    const auto now = Clock::now();
    if (busy) {
      busy_until = now + kSpin;
    } else if (now > busy_until) {
      worker_.sleep(kSleepS);
    }
  }
  close_connections();
}

bool Server::State::accept_requests() {
  if (requests_.empty()) return false;
  ucp_conn_request_h request = requests_.front();
  requests_.pop_front();
  if (connections_.size() >= kMaxConnections) {
    (void)worker_.lib().ucp_listener_reject(listener_, request);
    return true;
  }
  try {
    connections_.push_back(std::make_unique<Connection>(*this, worker_, request));
  } catch (const std::exception&) {
    // Whoever asked has gone again, or UCX has nothing left for it; its own deadline tells it.
  }
  num_connections_.store(connections_.size());
  return true;
}

bool Server::State::advance_connections() {
  bool busy = false;
  for (const auto& one : connections_) busy |= one->advance();
  if (std::erase_if(connections_, [](const auto& one) { return one->is_gone(); }) != 0) {
    num_connections_.store(connections_.size());
  }
  return busy;
}

void Server::State::close_connections() noexcept {
  worker_.lib().ucp_listener_destroy(listener_);
  for (const auto& one : connections_) one->drop();
  const auto deadline = after(kCloseS);
  while (!connections_.empty() && Clock::now() < deadline) {
    (void)worker_.progress();
    (void)advance_connections();
  }
  quiet_ = connections_.empty();
  // What UCX may still write to is left to it, rather than waiting for ever.
  for (auto& one : connections_) (void)one.release();
  if (!quiet_) worker_.abandon();
  connections_.clear();
  num_connections_.store(0);
}

Server::Server(std::shared_ptr<Context> context, const std::string& host, const std::string& secret,
               const ServedBoard& board, int num_threads, const Settings& settings)
    : state_(std::make_unique<State>(std::move(context), host, secret, board, num_threads,
                                     settings)) {}
Server::~Server() = default;
std::uint16_t Server::port() const { return state_->port(); }
void Server::add_region(std::uint64_t address, std::uint64_t num_bytes) {
  state_->add_region({address, num_bytes});
}
std::size_t Server::num_connections() const { return state_->num_connections(); }
bool Server::close() { return state_->close(); }

}  // namespace kvxfer::ucx
