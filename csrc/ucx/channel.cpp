#include "ucx/channel.hpp"

#include <array>
#include <utility>

#include "ucx/address.hpp"

namespace kvxfer::ucx {

namespace {

// Above one segment of a transport UCX would cut an eager message and join it in a buffer of its
// own: two copies more than a rendezvous, which lands where it is to lie.
constexpr std::size_t kRendezvousBytes = 64 << 10;

}  // namespace

/// What one nbx call needs until UCX is done with it.
struct Channel::Operation {
  Channel* channel;
  std::vector<std::byte> header;
  std::vector<std::byte> data;
  Done done;

  void finish(ucs_status_t status) noexcept {
    --channel->num_in_flight_;
    ++channel->num_ended_;
    if (done) done(status);
    delete this;
  }
};

Channel::Channel(Worker& worker, const std::string& host, std::uint16_t port) : worker_(worker) {
  const SocketAddress address(host, port);
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr.addr = address.get();
  params.sockaddr.addrlen = address.num_bytes();
  create(params, "connecting to " + host + ":" + std::to_string(port));
}

Channel::Channel(Worker& worker, ucp_conn_request_h request) : worker_(worker) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
  params.conn_request = request;
  create(params, "accepting a connection");
}

void Channel::create(ucp_ep_params_t& params, const std::string& what) {
  params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = &Channel::on_error;
  params.err_handler.arg = this;
  check(worker_.lib().ucp_ep_create(worker_.handle(), &params, &endpoint_), what);
}

Channel::~Channel() {
  if (!is_closed()) worker_.abandon();  // UCX still has our address; see the owner's deadline
}

void Channel::send_bytes(Message message, std::span<const std::byte> header,
                         std::vector<std::byte> data) {
  auto* sent = new Operation{this, {header.begin(), header.end()}, std::move(data), nullptr};
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.cb.send = &Channel::on_sent;
  param.user_data = sent;
  param.flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER;
  start(worker_.lib().ucp_am_send_nbx(endpoint_, static_cast<unsigned>(message),
                                      sent->header.data(), sent->header.size(), sent->data.data(),
                                      sent->data.size(), &param),
        sent);
}

void Channel::send_piece(const Piece& piece, std::span<const std::byte> data, const Memory* memory,
                         bool rendezvous, Done done) {
  const auto header = std::as_bytes(std::span<const Piece>(&piece, 1));
  auto* sent = new Operation{this, {header.begin(), header.end()}, {}, std::move(done)};
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                       UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.send = &Channel::on_sent;
  param.user_data = sent;
  param.flags = UCP_AM_SEND_FLAG_REPLY;
  if (rendezvous || data.size() >= kRendezvousBytes) param.flags |= UCP_AM_SEND_FLAG_RNDV;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  if (memory != nullptr) {
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    param.memh = static_cast<ucp_mem_h>(memory->handle());
  }
  start(worker_.lib().ucp_am_send_nbx(endpoint_, static_cast<unsigned>(Message::kPiece),
                                      sent->header.data(), sent->header.size(), data.data(),
                                      data.size(), &param),
        sent);
}

void Channel::fetch(Arrival arrival, std::span<std::byte> to, const Memory* memory, Done done) {
  auto* fetched = new Operation{this, {}, {}, std::move(done)};
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                       UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
  param.cb.recv_am = &Channel::on_fetched;
  param.user_data = fetched;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  if (memory != nullptr) {
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    param.memh = static_cast<ucp_mem_h>(memory->handle());
  }
  start(worker_.lib().ucp_am_recv_data_nbx(worker_.handle(), arrival.consume(), to.data(),
                                           to.size(), &param),
        fetched);
}

void Channel::start(ucs_status_ptr_t request, Operation* operation) {
  ++num_in_flight_;
  if (request == nullptr) {
    operation->finish(UCS_OK);
  } else if (UCS_PTR_IS_ERR(request)) {
    operation->finish(UCS_PTR_STATUS(request));
  }
}

void Channel::on_sent(void* request, ucs_status_t status, void* operation) noexcept {
  auto* sent = static_cast<Operation*>(operation);
  sent->channel->worker_.lib().ucp_request_free(request);
  if (status != UCS_OK && sent->channel->status_ == UCS_OK) sent->channel->status_ = status;
  sent->finish(status);
}

void Channel::on_fetched(void* request, ucs_status_t status, std::size_t,
                         void* operation) noexcept {
  on_sent(request, status, operation);
}

void Channel::on_error(void* channel, ucp_ep_h, ucs_status_t status) noexcept {
  auto* self = static_cast<Channel*>(channel);
  if (self->status_ == UCS_OK) self->status_ = status;
}

std::string Channel::transports() const {
  std::array<ucp_transport_entry_t, 16> entries{};
  ucp_ep_attr_t attr{};
  attr.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
  attr.transports.entries = entries.data();
  attr.transports.num_entries = entries.size();
  attr.transports.entry_size = sizeof(entries[0]);
  if (worker_.lib().ucp_ep_query(endpoint_, &attr) != UCS_OK) return "unknown";
  std::string names;
  for (unsigned at = 0; at < attr.transports.num_entries; ++at) {
    const std::string device = entries[at].device_name;
    const std::string name = std::string(entries[at].transport_name) + "/" + device;
    // The lane that connected has no device and carries no data.
    if (device.empty() || names.find(name) != std::string::npos) continue;
    names += (names.empty() ? "" : ", ") + name;
  }
  return names;
}

void Channel::close() {
  if (endpoint_ == nullptr) return;
  if (status_ == UCS_OK) status_ = UCS_ERR_CANCELED;
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  param.cb.send = &Channel::on_closed;
  param.user_data = this;
  ucs_status_ptr_t request =
      worker_.lib().ucp_ep_close_nbx(std::exchange(endpoint_, nullptr), &param);
  closed_ = !UCS_PTR_IS_PTR(request);
}

void Channel::on_closed(void* request, ucs_status_t, void* channel) noexcept {
  auto* self = static_cast<Channel*>(channel);
  self->worker_.lib().ucp_request_free(request);
  self->closed_ = true;
}

}  // namespace kvxfer::ucx
