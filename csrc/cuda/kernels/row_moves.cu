// Rows in and out of a chunk: gather, scatter with the divisor applied, the cast of a finished sum, column sums.
// All are bound by memory: each element is read once and written once, in 16-byte accesses where alignment allows.
#include "device.cuh"
#include "launch.h"

namespace syncfree {
namespace {

constexpr int kThreads = 256;

// Eight elements at once, when both sides are 16-byte aligned throughout.
template <class In, class Out, class F>
__device__ __forceinline__ void map_row(const In* in, Out* out, int64_t n, int64_t begin, int64_t step, F f) {
  constexpr int kIn = 8 / Pack<In>::kSize, kOut = 8 / Pack<Out>::kSize;
  int64_t done = 0;
  if (is_aligned(in) && is_aligned(out)) {
    done = n / 8 * 8;
    for (int64_t i = begin; i < n / 8; i += step) {
      float v[8];
#pragma unroll
      for (int a = 0; a < kIn; ++a) {
        const Pack<In> x = reinterpret_cast<const Pack<In>*>(in + i * 8)[a];
#pragma unroll
        for (int e = 0; e < Pack<In>::kSize; ++e) v[a * Pack<In>::kSize + e] = to_float(x.v[e]);
      }
#pragma unroll
      for (int b = 0; b < kOut; ++b) {
        Pack<Out> y;
#pragma unroll
        for (int e = 0; e < Pack<Out>::kSize; ++e) y.v[e] = from_float<Out>(f(v[b * Pack<Out>::kSize + e]));
        reinterpret_cast<Pack<Out>*>(out + i * 8)[b] = y;
      }
    }
  }
  for (int64_t i = done + begin; i < n; i += step) out[i] = from_float<Out>(f(to_float(in[i])));
}

template <class Out>
__device__ __forceinline__ void zero_row(Out* out, int64_t n, int64_t begin, int64_t step) {
  constexpr int kVec = Pack<Out>::kSize;
  int64_t done = 0;
  if (is_aligned(out)) {
    done = n / kVec * kVec;
    for (int64_t i = begin; i < n / kVec; i += step) reinterpret_cast<uint4*>(out)[i] = make_uint4(0, 0, 0, 0);
  }
  for (int64_t i = done + begin; i < n; i += step) out[i] = from_float<Out>(0.f);
}

template <class In, class Out>
__global__ void __launch_bounds__(kThreads) gather_kernel(GatherParams p) {
  const int64_t k = blockIdx.x;
  Out* out = static_cast<Out*>(p.out) + k * p.out_pitch;
  if (k >= live_rows(p.chunk)) return zero_row(out, p.columns, threadIdx.x, kThreads);
  const In* in = static_cast<const In*>(p.input) + p.chunk.row_index[p.chunk.first + k] * p.input_pitch;
  map_row(in, out, p.columns, threadIdx.x, kThreads, [](float x) { return x; });
}

// The largest absolute value of a row; NaN is passed over, since such a row is stored as it is.
__device__ __forceinline__ float largest_of(const float* in, int64_t n, float factor) {
  __shared__ float shared[kThreads / kWarp];
  float m = 0.f;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) m = fmaxf(m, fabsf(in[i] * factor));
  return block_reduce<kThreads>(m, Max(), shared);
}

template <class Out>
__global__ void __launch_bounds__(kThreads) store_rows_kernel(StoreRowsParams p) {
  const int64_t k = blockIdx.x, row = p.chunk.row_index[p.chunk.first + k];
  Out* out = static_cast<Out*>(p.out) + row * p.out_pitch;
  if (k >= live_rows(p.chunk)) {
    if (p.row_scale && threadIdx.x == 0) p.row_scale[row] = 1.f;
    return zero_row(out, p.columns, threadIdx.x, kThreads);
  }
  const float* in = static_cast<const float*>(p.product) + k * p.product_pitch;
  float alpha = *static_cast<const float*>(p.alpha);
  if (p.row_scale) {
    float remove;
    const float factor = half_row_factor(largest_of(in, p.columns, alpha), remove);
    if (threadIdx.x == 0) p.row_scale[row] = remove;
    map_row(in, out, p.columns, threadIdx.x, kThreads, [=](float x) { return (x * alpha) * factor; });
  } else {
    map_row(in, out, p.columns, threadIdx.x, kThreads, [=](float x) { return x * alpha; });
  }
}

template <class W>
__global__ void __launch_bounds__(kThreads) add_targets_kernel(AddTargetsParams p) {
  const int64_t k = blockIdx.x;
  if (k >= live_rows(p.chunk)) return;
  const int64_t target = p.target[p.chunk.row_index[p.chunk.first + k] + p.shift];
  const bool here = target >= p.first_class && target - p.first_class < p.classes;
  const int64_t t = here ? target - p.first_class : 0;
  const float residue = static_cast<const float*>(p.residue)[k];
  const W* w = static_cast<const W*>(p.weight) + t * p.weight_pitch;
  float* product = static_cast<float*>(p.product) + k * p.product_pitch;
  for (int64_t j = threadIdx.x; j < p.columns; j += kThreads) product[j] = fmaf(residue, to_float(w[j]), product[j]);
}

// blockIdx.y splits a row when no row_scale ties it together. sum and out may be the same memory.
template <class Out>
__global__ void __launch_bounds__(kThreads) cast_rows_kernel(CastRowsParams p) {
  const int64_t row = blockIdx.x;
  const float* in = static_cast<const float*>(p.sum) + row * p.columns;
  Out* out = static_cast<Out*>(p.out) + row * p.columns;
  const float alpha = p.alpha ? *static_cast<const float*>(p.alpha) : 1.f;
  if (p.row_scale) {
    float remove;
    const float factor = half_row_factor(largest_of(in, p.columns, alpha), remove);
    if (threadIdx.x == 0) p.row_scale[row] = remove;
    map_row(in, out, p.columns, threadIdx.x, kThreads, [=](float x) { return (x * alpha) * factor; });
  } else {
    const int64_t begin = int64_t(blockIdx.y) * kThreads + threadIdx.x, step = int64_t(gridDim.y) * kThreads;
    map_row(in, out, p.columns, begin, step, [=](float x) { return x * alpha; });
  }
}

// Column sums: slices of rows in parallel, then the slices in order.
constexpr int kSlices = 16;

template <class T>
__global__ void __launch_bounds__(kThreads) column_slices_kernel(ColumnSumParams p) {
  const int64_t column = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= p.columns) return;
  const int64_t live = live_rows(p.chunk), each = (live + kSlices - 1) / kSlices, begin = blockIdx.y * each;
  const int64_t end = begin + each < live ? begin + each : live;
  const T* g = static_cast<const T*>(p.g) + column;
  float sum = 0.f;
#pragma unroll 8
  for (int64_t k = begin; k < end; ++k) sum += to_float(g[k * p.g_pitch]);
  static_cast<float*>(p.scratch)[blockIdx.y * p.columns + column] = sum;
}

__global__ void __launch_bounds__(kThreads) column_finish_kernel(ColumnSumParams p) {
  const int64_t column = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= p.columns) return;
  float* out = static_cast<float*>(p.sum) + column;
  float sum = p.accumulate ? *out : 0.f;
  for (int s = 0; s < kSlices; ++s) sum += static_cast<const float*>(p.scratch)[s * p.columns + column];
  *out = sum;
}

template <class In>
cudaError_t gather_from(const GatherParams& p, cudaStream_t stream) {
  const unsigned blocks = unsigned(p.chunk.size);
  switch (p.out_dtype) {
    case DType::f32:
      gather_kernel<In, float><<<blocks, kThreads, 0, stream>>>(p);
      break;
    case DType::bf16:
      gather_kernel<In, __nv_bfloat16><<<blocks, kThreads, 0, stream>>>(p);
      break;
    case DType::f16:
      gather_kernel<In, __half><<<blocks, kThreads, 0, stream>>>(p);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace

int64_t column_sum_scratch_bytes(int64_t columns) {
  return columns * kSlices * int64_t(sizeof(float));
}

cudaError_t launch_gather(const GatherParams& p, cudaStream_t stream) {
  switch (p.input_dtype) {
    case DType::f32:
      return gather_from<float>(p, stream);
    case DType::bf16:
      return gather_from<__nv_bfloat16>(p, stream);
    case DType::f16:
      return gather_from<__half>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t launch_add_targets(const AddTargetsParams& p, cudaStream_t stream) {
  const unsigned blocks = unsigned(p.chunk.size);
  switch (p.weight_dtype) {
    case DType::f32:
      add_targets_kernel<float><<<blocks, kThreads, 0, stream>>>(p);
      break;
    case DType::bf16:
      add_targets_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(p);
      break;
    case DType::f16:
      add_targets_kernel<__half><<<blocks, kThreads, 0, stream>>>(p);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

cudaError_t launch_store_rows(const StoreRowsParams& p, cudaStream_t stream) {
  const unsigned blocks = unsigned(p.chunk.size);
  switch (p.out_dtype) {
    case DType::f32:
      store_rows_kernel<float><<<blocks, kThreads, 0, stream>>>(p);
      break;
    case DType::bf16:
      store_rows_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(p);
      break;
    case DType::f16:
      store_rows_kernel<__half><<<blocks, kThreads, 0, stream>>>(p);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

cudaError_t launch_cast_rows(const CastRowsParams& p, cudaStream_t stream) {
  constexpr int64_t kPerBlock = 8 * kThreads;
  const int64_t split = p.row_scale || p.rows > 4096 ? 1 : (p.columns + kPerBlock - 1) / kPerBlock;
  const dim3 blocks(unsigned(p.rows), unsigned(split < 65535 ? split : 65535));
  switch (p.out_dtype) {
    case DType::f32:
      cast_rows_kernel<float><<<blocks, kThreads, 0, stream>>>(p);
      break;
    case DType::bf16:
      cast_rows_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(p);
      break;
    case DType::f16:
      cast_rows_kernel<__half><<<blocks, kThreads, 0, stream>>>(p);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

cudaError_t launch_column_sum(const ColumnSumParams& p, cudaStream_t stream) {
  const dim3 blocks(unsigned((p.columns + kThreads - 1) / kThreads), kSlices);
  switch (p.g_dtype) {
    case DType::f32:
      column_slices_kernel<float><<<blocks, kThreads, 0, stream>>>(p);
      break;
    case DType::bf16:
      column_slices_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(p);
      break;
    case DType::f16:
      column_slices_kernel<__half><<<blocks, kThreads, 0, stream>>>(p);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  column_finish_kernel<<<blocks.x, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace syncfree
