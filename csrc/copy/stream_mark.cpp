#include "copy/stream_mark.hpp"

#include "core/cuda_check.hpp"

namespace kvxfer {

StreamMark::StreamMark(int device, std::uint64_t stream) : device_(device) {
  const DeviceGuard guard(device);
  cudaEvent_t event = nullptr;
  KVXFER_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  const cudaError_t status = cudaEventRecord(event, reinterpret_cast<cudaStream_t>(stream));
  if (status != cudaSuccess) (void)cudaEventDestroy(event);
  check_cuda(status, "cudaEventRecord", __FILE__, __LINE__);
  event_ = event;
}

StreamMark::~StreamMark() {
  int previous = 0;
  (void)cudaGetDevice(&previous);
  (void)cudaSetDevice(device_);
  (void)cudaEventDestroy(static_cast<cudaEvent_t>(event_));
  (void)cudaSetDevice(previous);
}

void StreamMark::hold_back(std::uint64_t stream) const {
  KVXFER_CUDA_CHECK(cudaStreamWaitEvent(reinterpret_cast<cudaStream_t>(stream),
                                        static_cast<cudaEvent_t>(event_), 0));
}

bool StreamMark::is_reached() const {
  const cudaError_t status = cudaEventQuery(static_cast<cudaEvent_t>(event_));
  if (status == cudaErrorNotReady) return false;
  KVXFER_CUDA_CHECK(status);
  return true;
}

}  // namespace kvxfer
