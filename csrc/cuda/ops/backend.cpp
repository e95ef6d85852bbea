// Device, stream and errors.
#include "../backend.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace syncfree {
namespace {

cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  check_shim(aoti_torch_get_current_cuda_stream(device, &stream), "aoti_torch_get_current_cuda_stream");
  return static_cast<cudaStream_t>(stream);
}

}  // namespace

CudaBackend::CudaBackend(int32_t device) : guard_(device), stream_(current_stream(device)) {
  // With a driver too old for the runtime in this library no call succeeds: say which, once, before a kernel fails for
  // a stranger reason.
  static const cudaError_t usable = [] {
    int count = 0;
    return cudaGetDeviceCount(&count);
  }();
  if (usable == cudaErrorInsufficientDriver)
    throw std::runtime_error(
        "syncfree: this build carries the CUDA 13 runtime, which needs an NVIDIA driver of the 580 series or newer");
  done(usable, "device query");
}

bool CudaBackend::is_capturing() const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  done(cudaStreamIsCapturing(stream_, &status), "query of the capture");
  return status != cudaStreamCaptureStatusNone;
}

void CudaBackend::done(cudaError_t error, const char* kernel) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // reported here, not again by the next launch
  throw std::runtime_error(std::string("syncfree: ") + kernel + " kernel: " + cudaGetErrorString(error));
}

}  // namespace syncfree
