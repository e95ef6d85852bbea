// Host memory that kernels store to and the host reads, seen by torch from both sides.
#include "mapped.h"

#include <cstring>

#include "../backend.h"

namespace syncfree {

std::tuple<Tensor, Tensor> mapped_slots(Tensor like, int64_t rows, int64_t width) {
  constexpr const char* op = "syncfree::mapped_slots";
  SF_CHECK(rows >= 1 && width >= kSlotColumns, op, ": expected rows >= 1 and width >= ", int(kSlotColumns), ", got ",
           rows, " and ", width);
  const CudaBackend guard(like);  // the memory belongs to the device that is current now
  const size_t bytes = size_t(rows) * size_t(width) * sizeof(int64_t);
  void* host = nullptr;
  void* device = nullptr;
  cudaError_t error = cudaHostAlloc(&host, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  if (error == cudaSuccess) error = cudaHostGetDevicePointer(&device, host, 0);
  if (error != cudaSuccess) {
    if (host) cudaFreeHost(host);
    cudaGetLastError();  // reported here, not again by the next launch
    throw std::runtime_error(message(op, ": ", int64_t(bytes), " bytes of mapped memory: ", cudaGetErrorString(error)));
  }
  std::memset(host, 0, bytes);
  const int64_t size[2] = {rows, width}, stride[2] = {width, 1};
  const torch::headeronly::IntHeaderOnlyArrayRef sizes(size, 2), strides(stride, 2);
  using torch::headeronly::DeviceType;
  return {torch::stable::from_blob(host, sizes, strides, torch::stable::Device(DeviceType::CPU), ScalarType::Long),
          torch::stable::from_blob(
              device, sizes, strides,
              torch::stable::Device(DeviceType::CUDA, static_cast<torch::stable::DeviceIndex>(like.get_device_index())),
              ScalarType::Long)};
}

}  // namespace syncfree
