#include "ucx/worker.hpp"

#include <poll.h>

#include <algorithm>

namespace kvxfer::ucx {

Clock::time_point after(double seconds) {
  const double bounded_s = std::clamp(seconds, 0.0, 1e9);
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded_s));
}

Arrival::~Arrival() {
  if (kept_ && data_ != nullptr) worker_->lib().ucp_am_data_release(worker_->handle(), data_);
}

Worker::Worker(std::shared_ptr<Context> context, Receiver& receiver)
    : context_(std::move(context)), library_(&library()), receiver_(receiver) {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  check(library_->ucp_worker_create(static_cast<ucp_context_h>(context_->handle()), &params,
                                    &worker_),
        "ucp_worker_create");
  try {
    check(library_->ucp_worker_get_efd(worker_, &event_fd_), "ucp_worker_get_efd");
    for (std::size_t at = 0; at < routes_.size(); ++at) listen_to(static_cast<Message>(at));
  } catch (...) {
    library_->ucp_worker_destroy(worker_);
    throw;
  }
}

Worker::~Worker() {
  if (!abandoned_) {
    library_->ucp_worker_destroy(worker_);
  } else {
    new std::shared_ptr<Context>(context_);  // a worker that stays needs its context
  }
}

void Worker::listen_to(Message message) {
  Route& route = routes_[static_cast<std::size_t>(message)];
  route = {this, message};
  ucp_am_handler_param_t param{};
  param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                     UCP_AM_HANDLER_PARAM_FIELD_ARG;
  param.id = static_cast<unsigned>(message);
  param.cb = &Worker::on_message;
  param.arg = &route;
  check(library_->ucp_worker_set_am_recv_handler(worker_, &param),
        "ucp_worker_set_am_recv_handler");
}

ucs_status_t Worker::on_message(void* route, const void* header, std::size_t header_bytes,
                                void* data, std::size_t num_bytes,
                                const ucp_am_recv_param_t* param) noexcept {
  const auto* to = static_cast<const Route*>(route);
  const bool answers = (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0;
  Arrival arrival(*to->worker, data, num_bytes,
                  (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0);
  to->worker->receiver_.on_message(to->message, answers ? param->reply_ep : nullptr,
                                   {static_cast<const std::byte*>(header), header_bytes}, arrival);
  return arrival.is_taken() && arrival.is_rendezvous() ? UCS_INPROGRESS : UCS_OK;
}

void Worker::sleep(double timeout_s) {
  if (library_->ucp_worker_arm(worker_) != UCS_OK) return;  // something came meanwhile
  pollfd wait{event_fd_, POLLIN, 0};
  (void)::poll(&wait, 1, static_cast<int>(std::clamp(timeout_s, 0.0, 1.0) * 1000));
}

}  // namespace kvxfer::ucx
