#include "ucx/context.hpp"

#include <cstdio>
#include <cstdlib>

#include "ucx/library.hpp"

namespace kvxfer::ucx {

namespace {

ucp_context_h context_of(void* handle) { return static_cast<ucp_context_h>(handle); }

/// A configuration as the environment has it.
class Config {
 public:
  Config() { check(library().ucp_config_read(nullptr, nullptr, &config_), "ucp_config_read"); }
  ~Config() { library().ucp_config_release(config_); }
  Config(const Config&) = delete;
  Config& operator=(const Config&) = delete;

  [[nodiscard]] const ucp_config_t* get() const { return config_; }

  void set(const std::string& name, const std::string& value) {
    const ucs_status_t status = library().ucp_config_modify(config_, name.c_str(), value.c_str());
    if (status == UCS_OK) return;
    throw Error(ErrorKind::kInvalidUsage,
                describe(status, "UCX takes no option " + name + "=" + value), status);
  }

  /// Every setting, one a line.
  [[nodiscard]] std::string text() const {
    char* text = nullptr;
    std::size_t length = 0;
    std::FILE* stream = ::open_memstream(&text, &length);
    if (stream == nullptr) throw_errno("open_memstream");
    library().ucp_config_print(config_, stream, nullptr, UCS_CONFIG_PRINT_CONFIG);
    (void)std::fclose(stream);
    std::string out(text, length);
    std::free(text);
    return out;
  }

 private:
  ucp_config_t* config_ = nullptr;
};

/// The value of a setting in the text of all; empty where it has no such line.
std::string value_of(const std::string& text, const std::string& name) {
  const std::string line = "\nUCX_" + name + "=";
  const std::size_t at = ("\n" + text).find(line);
  if (at == std::string::npos) return "";
  const std::size_t begin = at + line.size() - 1;
  return text.substr(begin, text.find('\n', begin) - begin);
}

/// What UCX itself takes for a setting whose default kvxfer replaces; empty for one of its TCP
/// transport, which is not among those of `Config::text`.
const char* own_default(const std::string& name) {
  if (name.rfind("TCP_", 0) == 0) return "";
  return name == "NET_DEVICES" ? "all" : "auto";
}

}  // namespace

std::string load(const std::vector<std::string>& candidates) {
  const Library& opened = open_library(candidates);
  return opened.ucp_get_version_string();
}

std::shared_ptr<Context> Context::create(const Options& options, const Options& defaults) {
  std::shared_ptr<Context> made(new Context);
  Config config;
  // All memory is registered here and its kind is said, so that UCX need not patch malloc and mmap
  // of the whole process to learn what changes.
  config.set("RCACHE_ENABLE", "n");
  config.set("MEMTYPE_CACHE", "n");
  const std::string found = config.text();
  for (const auto& [name, value] : defaults) {
    if (value_of(found, name) == own_default(name)) config.set(name, value);
  }
  for (const auto& [name, value] : options) config.set(name, value);
  ucp_params_t params{};
  params.field_mask =
      UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.mt_workers_shared = 1;
  params.name = "kvxfer";
  ucp_context_h context = nullptr;
  const ucs_status_t status =
      library().ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config.get(), &context);
  if (status != UCS_OK) {
    throw Error(ErrorKind::kNotAvailable, describe(status, "UCX cannot start"), status);
  }
  made->handle_ = context;
  return made;
}

Context::~Context() {
  if (handle_ != nullptr) library().ucp_cleanup(context_of(handle_));
}

std::shared_ptr<Memory> Context::register_memory(std::uint64_t address, std::uint64_t num_bytes) {
  const std::lock_guard lock(mutex_);
  std::erase_if(memories_, [](const auto& one) { return one.second.expired(); });
  std::weak_ptr<Memory>& entry = memories_[address];
  std::shared_ptr<Memory> memory = entry.lock();
  if (memory == nullptr || memory->num_bytes() < num_bytes) {
    memory = std::make_shared<Memory>(shared_from_this(), address, num_bytes);
    entry = memory;
  }
  return memory;
}

std::shared_ptr<Memory> Context::find(std::uint64_t address, std::uint64_t num_bytes) {
  const std::lock_guard lock(mutex_);
  auto after = memories_.upper_bound(address);
  if (after == memories_.begin()) return nullptr;
  std::shared_ptr<Memory> memory = std::prev(after)->second.lock();
  if (memory == nullptr) return nullptr;
  const std::uint64_t offset = address - memory->address();
  const bool covers = num_bytes <= memory->num_bytes() && offset <= memory->num_bytes() - num_bytes;
  return covers ? memory : nullptr;
}

Memory::Memory(std::shared_ptr<Context> context, std::uint64_t address, std::uint64_t num_bytes)
    : context_(std::move(context)), address_(address), num_bytes_(num_bytes) {
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  params.address = reinterpret_cast<void*>(address);
  params.length = num_bytes;
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  ucp_mem_h memory = nullptr;
  const ucs_status_t status =
      library().ucp_mem_map(context_of(context_->handle()), &params, &memory);
  if (status != UCS_OK) {
    throw Error(ErrorKind::kRegistration,
                describe(status, "UCX cannot register " + std::to_string(num_bytes) +
                                     " bytes of host memory; raise the limit of locked memory "
                                     "(ulimit -l)"),
                status);
  }
  handle_ = memory;
}

Memory::~Memory() {
  (void)library().ucp_mem_unmap(context_of(context_->handle()), static_cast<ucp_mem_h>(handle_));
}

}  // namespace kvxfer::ucx
