// data *= scale over several tensors in one launch, read from device memory; nothing is touched where the factor is 1.
// Bytes: 2 for each byte of data when it is scaled, 4 in all when it is not.
#include "device.cuh"
#include "launch.h"

namespace syncfree {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerTensor = 1024;

__device__ __forceinline__ double read_scale(const ScaleParams& p) {
  switch (p.scale_dtype) {
    case DType::f64:
      return *static_cast<const double*>(p.scale);
    case DType::bf16:
      return to_float(*static_cast<const __nv_bfloat16*>(p.scale));
    case DType::f16:
      return to_float(*static_cast<const __half*>(p.scale));
    default:
      return *static_cast<const float*>(p.scale);
  }
}

template <class T>
__device__ __forceinline__ T times(T x, float f) {
  return from_float<T>(to_float(x) * f);
}
__device__ __forceinline__ double times(double x, double f) {
  return x * f;
}

// F: float, or double for double data.
template <class T, class F>
__device__ __forceinline__ void scale_item(const ScaleParams::Item& item, F scale) {
  if (!item.row_scale && scale == F(1)) return;
  T* data = static_cast<T*>(item.data);
  const int64_t n = item.rows * item.columns, step = int64_t(gridDim.x) * kThreads,
                begin = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  constexpr int kVec = Pack<T>::kSize;
  // A pack lies within one row when the rows are whole packs.
  int64_t done = 0;
  if (is_aligned(data) && (!item.row_scale || item.columns % kVec == 0)) {
    done = n / kVec * kVec;
    for (int64_t i = begin; i < n / kVec; i += step) {
      const F factor = item.row_scale ? scale * F(item.row_scale[i * kVec / item.columns]) : scale;
      if (factor == F(1)) continue;
      Pack<T> x = reinterpret_cast<const Pack<T>*>(data)[i];
#pragma unroll
      for (int e = 0; e < kVec; ++e) x.v[e] = times(x.v[e], factor);
      reinterpret_cast<Pack<T>*>(data)[i] = x;
    }
  }
  for (int64_t i = done + begin; i < n; i += step) {
    const F factor = item.row_scale ? scale * F(item.row_scale[i / item.columns]) : scale;
    if (factor != F(1)) data[i] = times(data[i], factor);
  }
}

__global__ void __launch_bounds__(kThreads) scale_kernel(const __grid_constant__ ScaleParams p) {
  const double scale = read_scale(p);
  const ScaleParams::Item& item = p.items[blockIdx.y];
  switch (item.dtype) {
    case DType::f64:
      return scale_item<double, double>(item, scale);
    case DType::f32:
      return scale_item<float, float>(item, float(scale));
    case DType::bf16:
      return scale_item<__nv_bfloat16, float>(item, float(scale));
    case DType::f16:
      return scale_item<__half, float>(item, float(scale));
  }
}

}  // namespace

cudaError_t launch_scale(const ScaleParams& p, cudaStream_t stream) {
  scale_kernel<<<dim3(kBlocksPerTensor, unsigned(p.count)), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace syncfree
