// The ucx transport in a build without UCX's headers: every name is there and says what is missing.

#include "core/error.hpp"
#include "ucx/context.hpp"
#include "ucx/link.hpp"
#include "ucx/server.hpp"

namespace kvxfer::ucx {

namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorKind::kNotAvailable,
              "this build has no UCX; install libucx-cu13 (or UCX's development package) and build "
              "again with CMAKE_ARGS=-DKVXFER_UCX=ON");
}

}  // namespace

class Server::State {};
class Link::State {};

std::string load(const std::vector<std::string>&) { refuse(); }

std::shared_ptr<Context> Context::create(const Options&, const Options&) { refuse(); }
Context::~Context() = default;
std::shared_ptr<Memory> Context::register_memory(std::uint64_t, std::uint64_t) { refuse(); }
std::shared_ptr<Memory> Context::find(std::uint64_t, std::uint64_t) { refuse(); }
Memory::Memory(std::shared_ptr<Context>, std::uint64_t, std::uint64_t) { refuse(); }
Memory::~Memory() = default;

Server::Server(std::shared_ptr<Context>, const std::string&, const std::string&, const ServedBoard&,
               int, const Settings&) {
  refuse();
}
Server::~Server() = default;
std::uint16_t Server::port() const { refuse(); }
void Server::add_region(std::uint64_t, std::uint64_t) { refuse(); }
std::size_t Server::num_connections() const { refuse(); }
bool Server::close() { refuse(); }

Link::Link(std::shared_ptr<Context>, ServerAddress, int, const Settings&) { refuse(); }
Link::~Link() = default;
void Link::start_put(const CopyPlan&, std::uint64_t, std::uint64_t, int) { refuse(); }
void Link::start_get(const CopyPlan&, std::uint64_t, std::uint64_t, int) { refuse(); }
void Link::send_raw(unsigned, const std::string&, const std::string&) { refuse(); }
bool Link::poll(double) { refuse(); }
std::uint64_t Link::first_sequence() const { refuse(); }
std::string Link::transports() const { refuse(); }
bool Link::close() { refuse(); }

}  // namespace kvxfer::ucx
