#include "memory/shared_segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "core/check.hpp"

namespace kvxfer {

namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr std::uint64_t kMaxBytes = 1ull << 46;

std::uint64_t round_to_pages(std::uint64_t num_bytes) {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return (num_bytes + page - 1) / page * page;
}

void* map_shared(int fd, std::uint64_t num_bytes, int flags) {
  void* data = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | flags, fd, 0);
  if (data == MAP_FAILED) throw_errno("mmap of a shared segment of " + std::to_string(num_bytes));
  // A hint only: fewer page-table entries make the copy faster where the host allows huge pages.
  ::madvise(data, num_bytes, MADV_HUGEPAGE);
  return data;
}

}  // namespace

SharedSegment::SharedSegment(UniqueFd fd, std::uint64_t num_bytes, int flags)
    : fd_(std::move(fd)), num_bytes_(num_bytes), data_(map_shared(fd_.get(), num_bytes, flags)) {}

SharedSegment::SharedSegment(SharedSegment&& other) noexcept
    : fd_(std::move(other.fd_)),
      num_bytes_(other.num_bytes_),
      data_(std::exchange(other.data_, nullptr)) {}

SharedSegment::~SharedSegment() {
  if (data_ != nullptr) ::munmap(data_, num_bytes_);
}

SharedSegment SharedSegment::create(std::uint64_t num_bytes) {
  KVXFER_REQUIRE(num_bytes > 0 && num_bytes <= kMaxBytes,
                 "a shared segment of " + std::to_string(num_bytes) + " bytes; use 1 to " +
                     std::to_string(kMaxBytes));
  const std::uint64_t size = round_to_pages(num_bytes);
  UniqueFd fd(::memfd_create("kvxfer", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) throw_errno("memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(size)) != 0) {
    throw_errno("a shared segment of " + std::to_string(size) + " bytes");
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) throw_errno("sealing a shared segment");
  return SharedSegment(std::move(fd), size, 0);
}

SharedSegment SharedSegment::open(int pid, int fd, std::uint64_t num_bytes) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  UniqueFd own(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!own.valid()) {
    const int error_number = errno;
    if (error_number == ENOENT || error_number == ESRCH) {
      throw_errno(ErrorKind::kPeerLost, "opening " + path, error_number);
    }
    throw_errno(ErrorKind::kNotAvailable,
                "opening " + path + " (both processes need one user and one /proc)", error_number);
  }
  struct stat status{};
  if (::fstat(own.get(), &status) != 0) throw_errno("fstat of " + path);
  const int seals = ::fcntl(own.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    throw Error(ErrorKind::kRegistration, path + " is not a sealed shared segment");
  }
  if (num_bytes == 0 || static_cast<std::uint64_t>(status.st_size) != num_bytes) {
    throw Error(ErrorKind::kRegistration, path + " holds " + std::to_string(status.st_size) +
                                              " bytes, the peer says " + std::to_string(num_bytes));
  }
  // A fault for every small page at its first copy would cost more than the copy itself.
  return SharedSegment(std::move(own), num_bytes, MAP_POPULATE);
}

}  // namespace kvxfer
