// The CUDA interface of a build without CUDA: the same names, each saying why it cannot serve.

#include "copy/device_copier.hpp"
#include "copy/stream_mark.hpp"
#include "core/error.hpp"
#include "memory/device.hpp"
#include "memory/device_context.hpp"
#include "memory/ipc.hpp"
#include "memory/pointer_chase.hpp"

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
void enable_peer_access(int, int) { refuse(); }
PointerInfo pointer_info(std::uint64_t) { refuse(); }
std::uint64_t buffer_id(std::uint64_t) { refuse(); }

DeviceBuffer::DeviceBuffer(int device, std::uint64_t num_bytes)
    : device_(device), num_bytes_(num_bytes) {
  refuse();
}
DeviceBuffer::~DeviceBuffer() = default;
void DeviceBuffer::fill_from(const void*) { refuse(); }

PinnedRange::PinnedRange(std::uint64_t address, std::uint64_t) : address_(address) { refuse(); }
PinnedRange::~PinnedRange() = default;

ChaseResult chase_pointers(int, const IndexRing&, std::uint32_t) { refuse(); }

DeviceContext::DeviceContext(int device) : device_(device) { refuse(); }
DeviceContext::~DeviceContext() = default;
void DeviceContext::enter() const { refuse(); }
void DeviceContext::leave() const { refuse(); }

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
CopyEngine DeviceCopier::post(const CopyPlan&, const DeviceCopyOptions&, CompletionTarget,
                              const StreamMark*, const SegmentLookup*) {
  refuse();
}
bool DeviceCopier::wait(CompletionTarget, double) { refuse(); }
void DeviceCopier::set_bulk_shape(const BulkShape&) { refuse(); }

StreamMark::StreamMark(int device, std::uint64_t) : device_(device) { refuse(); }
StreamMark::~StreamMark() = default;
bool StreamMark::is_reached() const { refuse(); }

void pattern_fill_device(int, const PatternPages&, std::uint64_t) { refuse(); }
PatternMismatch pattern_check_device(int, const PatternPages&, std::uint64_t) { refuse(); }

}  // namespace kvxfer
