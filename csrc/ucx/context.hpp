#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace kvxfer::ucx {

class Memory;

/// Settings of UCX: a name without UCX_ in front, and its value.
using Options = std::vector<std::pair<std::string, std::string>>;

/// Opens UCX's library, see open_library. Returns its version. Throws Error(kNotAvailable).
std::string load(const std::vector<std::string>& candidates);

/// One configuration of UCX, with the memory that was registered in it. Thread-safe.
class Context : public std::enable_shared_from_this<Context> {
 public:
  /// `options` replace what the environment says; `defaults` only what nobody has set. Throws
  /// Error(kInvalidUsage) for a name that UCX does not know, Error(kNotAvailable) where nothing
  /// can be set up with the settings.
  static std::shared_ptr<Context> create(const Options& options, const Options& defaults);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  /// Registers a range of host memory, or shares the registration that it has already. Throws
  /// Error(kRegistration).
  std::shared_ptr<Memory> register_memory(std::uint64_t address, std::uint64_t num_bytes);

  /// The registration that covers the range; null where there is none.
  std::shared_ptr<Memory> find(std::uint64_t address, std::uint64_t num_bytes);

  /// A ucp_context_h.
  [[nodiscard]] void* handle() const noexcept { return handle_; }

 private:
  Context() = default;

  void* handle_ = nullptr;
  std::mutex mutex_;
  std::map<std::uint64_t, std::weak_ptr<Memory>> memories_;  // by address
};

/// A registered range; ends with its last owner. The range must outlive it.
class Memory {
 public:
  Memory(std::shared_ptr<Context> context, std::uint64_t address, std::uint64_t num_bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  [[nodiscard]] std::uint64_t address() const noexcept { return address_; }
  [[nodiscard]] std::uint64_t num_bytes() const noexcept { return num_bytes_; }
  /// A ucp_mem_h.
  [[nodiscard]] void* handle() const noexcept { return handle_; }

 private:
  std::shared_ptr<Context> context_;
  std::uint64_t address_;
  std::uint64_t num_bytes_;
  void* handle_ = nullptr;
};

}  // namespace kvxfer::ucx
