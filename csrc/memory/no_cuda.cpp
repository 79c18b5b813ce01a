// The CUDA interface of a build without CUDA: the same names, each saying why it cannot serve.

#include "copy/device_copier.hpp"
#include "core/error.hpp"
#include "memory/device.hpp"
#include "memory/ipc.hpp"

namespace kvxfer {

namespace {

constexpr const char* kReason =
    "this build has no CUDA; install with nvcc on PATH (KVXFER_CUDA=ON makes its absence an error)";

[[noreturn]] void refuse() { throw Error(ErrorKind::kNotAvailable, kReason); }

}  // namespace

int device_count() { return 0; }
std::string no_device_reason() { return kReason; }
DeviceInfo device_info(int) { refuse(); }
bool can_access_peer(int, int) { refuse(); }
PointerInfo pointer_info(std::uint64_t) { refuse(); }
std::uint64_t buffer_id(std::uint64_t) { refuse(); }

DeviceBuffer::DeviceBuffer(int device, std::uint64_t num_bytes)
    : device_(device), num_bytes_(num_bytes) {
  refuse();
}
DeviceBuffer::~DeviceBuffer() = default;

IpcExport::IpcExport(std::uint64_t, std::uint64_t) { refuse(); }
std::vector<int> IpcExport::chunk_fds() const { refuse(); }
std::unique_ptr<IpcMapping> IpcMapping::open_legacy(int, const std::string&, std::uint64_t) {
  refuse();
}
std::unique_ptr<IpcMapping> IpcMapping::open_chunks(int, int, const std::vector<int>&,
                                                    const std::vector<std::uint64_t>&) {
  refuse();
}

struct DeviceCopier::State {};
DeviceCopier::DeviceCopier(int, std::uint64_t, std::uint32_t) { refuse(); }
DeviceCopier::~DeviceCopier() = default;
CopyEngine DeviceCopier::post(const CopyPlan&, const DeviceCopyOptions&, CompletionTarget, bool,
                              std::uint64_t) {
  refuse();
}
bool DeviceCopier::wait(CompletionTarget, double) { refuse(); }
void DeviceCopier::set_bulk_shape(const BulkShape&) { refuse(); }

void pattern_fill_device(int, const PatternPages&, std::uint64_t) { refuse(); }
PatternMismatch pattern_check_device(int, const PatternPages&, std::uint64_t) { refuse(); }

}  // namespace kvxfer
