#pragma once

#include <cstdint>

namespace kvxfer {

/// A point in a stream's work: all that was queued on it when this object was made. Destruction
/// waits for nothing, and what was ordered behind the mark before stays so.
class StreamMark {
 public:
  /// Marks `stream` (a cudaStream_t of `device`; 0 is its default stream) where it is now.
  StreamMark(int device, std::uint64_t stream);
  ~StreamMark();
  StreamMark(const StreamMark&) = delete;
  StreamMark& operator=(const StreamMark&) = delete;

  [[nodiscard]] int device() const { return device_; }
  /// Lets nothing that is queued on `stream` (a cudaStream_t of any device) from now on begin
  /// before the mark is reached.
  void hold_back(std::uint64_t stream) const;
  /// Whether the work before the mark is done, for a host that waits itself. Throws Error(kCuda)
  /// where the GPU has failed.
  [[nodiscard]] bool is_reached() const;

 private:
  int device_;
  void* event_ = nullptr;  // a cudaEvent_t
};

}  // namespace kvxfer
