// What options add to the Hopper path beside the products: sums of rows of W or x for label smoothing, and the gradient
// of the bias. Bound by memory, in a fixed order: slices in parallel, then the slices one after the other.
#include "../hopper/dependent_launch.cuh"
#include "device.cuh"
#include "fused_chunk.cuh"

namespace syncfree {
namespace {

constexpr int kThreads = 128;
constexpr int kBiasSlices = 16;  // of a chunk's rows, for the gradient of the bias

unsigned blocks_of(int64_t n) {
  return unsigned((n + kThreads - 1) / kThreads);
}

__global__ void __launch_bounds__(kThreads) fused_bias_kernel(FusedBiasParams p) {
  const int64_t j = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (j < p.padded) p.out[j] = p.bias && j < p.num_classes ? p.bias[j] : 0.f;
}

// A thread adds up eight columns of a slice of the rows; the first blocks also what goes beside the rows.
template <class In>
__global__ void __launch_bounds__(kThreads) row_sum_slices_kernel(FusedRowSumParams p) {
  __shared__ double shared[kThreads / kWarp];
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x,
                count = p.counts ? static_cast<int64_t>(p.counts[kCountRows]) : p.count,
                each = (count + kRowSumSlices - 1) / kRowSumSlices, begin = blockIdx.y * each,
                end = begin + each < count ? begin + each : count;
  if (blockIdx.x == 0 && p.beside_sum) {
    double sum = 0;
    for (int64_t r = begin + threadIdx.x; r < end; r += kThreads) {
      const double factor = p.factor ? p.factor[r] : 1.f;
      if (factor != 0) sum += p.beside ? factor * p.beside[r] : factor;  // 0 times -inf counts as nothing
    }
    sum = block_reduce<kThreads>(sum, Sum(), shared);
    if (threadIdx.x == 0) p.beside_slices[blockIdx.y] = sum;
  }
  if (i >= p.hidden / 8) return;
  float y[8] = {};
#pragma unroll 4
  for (int64_t r = begin; r < end; ++r) {
    const float factor = p.factor ? p.factor[r] : 1.f;
    const int64_t row = p.index ? p.index[r] : r;
    Pack<__nv_bfloat16> x;
    load_bf16x8(static_cast<const In*>(p.matrix) + row * p.pitch, i, x);
#pragma unroll
    for (int e = 0; e < 8; ++e) y[e] = fmaf(factor, to_float(x.v[e]), y[e]);
  }
  store8(p.slices + blockIdx.y * p.hidden + i * 8, y);
}

__global__ void __launch_bounds__(kThreads) row_sum_finish_kernel(FusedRowSumParams p) {
  __shared__ double shared[kThreads / kWarp];
  if (blockIdx.x == 0 && p.beside_sum) {
    double sum = 0;
    for (int s = threadIdx.x; s < kRowSumSlices; s += kThreads) sum += p.beside_slices[s];
    sum = block_reduce<kThreads>(sum, Sum(), shared);
    if (threadIdx.x == 0) *p.beside_sum = sum;
  }
  const int64_t column = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= p.hidden) return;
  double sum = 0;
#pragma unroll 8
  for (int s = 0; s < kRowSumSlices; ++s) sum += p.slices[s * p.hidden + column];
  p.sum[column] = float(sum);
}

// A thread adds up v E over a slice of the chunk's rows, eight classes of it, onto what chunks before have left.
__global__ void __launch_bounds__(kThreads) bias_slices_kernel(FusedBiasGradientParams p) {
  sm90::begin_after_previous_launch();
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.e_pitch / 8) return;
  const int64_t live = ChunkRows(p.chunk).live, each = (live + kBiasSlices - 1) / kBiasSlices,
                begin = blockIdx.y * each, end = begin + each < live ? begin + each : live;
  float* sums = p.slices + blockIdx.y * p.e_pitch + i * 8;
  float y[8] = {};
  if (p.accumulate) {
#pragma unroll
    for (int e = 0; e < 8; ++e) y[e] = sums[e];
  }
  const __nv_bfloat16* at = static_cast<const __nv_bfloat16*>(p.e) + i * 8;
#pragma unroll 4
  for (int64_t k = begin; k < end; ++k) {
    const float v = p.v[k];
    const Pack<__nv_bfloat16> x = *reinterpret_cast<const Pack<__nv_bfloat16>*>(at + k * p.e_pitch);
#pragma unroll
    for (int e = 0; e < 8; ++e) y[e] = fmaf(v, to_float(x.v[e]), y[e]);
  }
  store8(sums, y);
}

// A warp a class: the slices, its rows' targets, and label smoothing's share.
__global__ void __launch_bounds__(kThreads) bias_finish_kernel(FusedBiasGradientParams p) {
  const int64_t j = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (j >= p.num_classes) return;
  float sum = lane < kBiasSlices ? p.slices[lane * p.e_pitch + j] : 0.f;
  if (const int32_t start = p.starts[j]; start >= 0) {
    const int32_t end = p.ends[j];
    for (int32_t r = start + lane; r < end; r += kWarp) sum += p.g_target[p.positions[r]];
  }
  sum = warp_reduce(sum, Sum());
  if (lane != 0) return;
  if (p.offset_sum) sum -= (p.class_weight ? p.class_weight[j] : 1.f) * float(*p.offset_sum);
  p.out[j] = sum * gradient_factor(p.chunk.counts, p.chunk.upstream);
}

}  // namespace

int64_t fused_bias_gradient_scratch(int64_t e_pitch) {
  return kBiasSlices * e_pitch;
}

cudaError_t launch_fused_bias(const FusedBiasParams& p, cudaStream_t stream) {
  fused_bias_kernel<<<blocks_of(p.padded), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_fused_row_sum(const FusedRowSumParams& p, cudaStream_t stream) {
  const dim3 blocks(blocks_of(p.hidden / 8), kRowSumSlices);
  switch (p.dtype) {
    case DType::f32:
      row_sum_slices_kernel<float><<<blocks, kThreads, 0, stream>>>(p);
      break;
    case DType::bf16:
      row_sum_slices_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(p);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  if (cudaError_t e = cudaGetLastError()) return e;
  row_sum_finish_kernel<<<blocks_of(p.hidden), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_fused_bias_slices(const FusedBiasGradientParams& p, cudaStream_t stream) {
  return sm90::launch_dependent(bias_slices_kernel, dim3(blocks_of(p.e_pitch / 8), kBiasSlices), kThreads, stream, p);
}

cudaError_t launch_fused_bias_finish(const FusedBiasGradientParams& p, cudaStream_t stream) {
  bias_finish_kernel<<<blocks_of(p.num_classes * kWarp), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace syncfree
