// The small kernels of the Hopper path over a slice of the classes: what they read and write instead of those of
// fused_rows.cu, so that statistics can be combined over slices between the products.
#include <cfloat>
#include <climits>

#include "fused_rows.cuh"

namespace syncfree {
namespace {

constexpr int kThreads = 128;
constexpr int32_t kOtherSlice = -1, kNoClass = -2;  // instead of a target

// The target counted from the slice's first class.
__device__ __forceinline__ int32_t target_in(const FusedSlice& s, int64_t t) {
  if (t < 0 || t >= s.total_classes) return kNoClass;
  return t >= s.first_class && t - s.first_class < s.num_classes ? int32_t(t - s.first_class) : kOtherSlice;
}

// A block for each position.
template <class In>
__global__ void __launch_bounds__(kThreads) shard_targets_kernel(const __grid_constant__ FusedShardTargetsParams p) {
  __shared__ float shared[kThreads / kWarp];
  const int64_t position = blockIdx.x;
  int32_t t = kOtherSlice;
  int64_t row = 0;
  if (position < static_cast<int64_t>(p.counts[kCountRows])) {
    row = p.row_index[position];
    t = target_in(p.slice, p.targets[row + p.shift]);
  }
  if (t < 0) {
    if (threadIdx.x == 0) p.logits[position] = t == kNoClass ? NAN : 0.f;
    return;
  }
  const In* x = static_cast<const In*>(p.input) + row * p.input_pitch;
  const Pack<__nv_bfloat16>* w =
      reinterpret_cast<const Pack<__nv_bfloat16>*>(static_cast<const __nv_bfloat16*>(p.weight) + t * p.weight_pitch);
  float dot = 0.f;
  for (int64_t i = threadIdx.x; i < p.hidden / 8; i += kThreads) {
    Pack<__nv_bfloat16> a;
    load_bf16x8(x, i, a);
    const Pack<__nv_bfloat16> b = w[i];
#pragma unroll
    for (int e = 0; e < 8; ++e) dot = fmaf(to_float(a.v[e]), to_float(b.v[e]), dot);
  }
  dot = block_reduce<kThreads>(dot, Sum(), shared);
  if (threadIdx.x == 0) p.logits[position] = dot;
}

// A block for each slot of the chunk.
template <class In>
__global__ void __launch_bounds__(kThreads) shard_gather_kernel(const __grid_constant__ FusedShardGatherParams p) {
  sm90::begin_after_previous_launch();
  const int64_t k = blockIdx.x;
  Pack<__nv_bfloat16>* out =
      reinterpret_cast<Pack<__nv_bfloat16>*>(static_cast<__nv_bfloat16*>(p.gathered) + k * p.hidden);
  if (threadIdx.x == 0 && k % kRowGroup == 0) p.rows.only[k / kRowGroup] = 0;
  if (threadIdx.x == 0 && k == 0) *p.rows.any = 0;
  const ChunkRows chunk(p.chunk);
  if (k >= chunk.live) {
    for (int64_t i = threadIdx.x; i < p.hidden / 8; i += kThreads)
      reinterpret_cast<uint4*>(out)[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) p.rows.exponent[k] = 0.f, p.rows.target[k] = kOtherSlice, p.rows.bad[k] = 0;
    return;
  }
  const int64_t row = chunk.row(p.chunk, k);
  const In* x = static_cast<const In*>(p.input) + row * p.input_pitch;
  for (int64_t i = threadIdx.x; i < p.hidden / 8; i += kThreads) {
    Pack<__nv_bfloat16> a;
    load_bf16x8(x, i, a);
    out[i] = a;
  }
  if (threadIdx.x == 0) {
    const float scale = float(option_logit_scale(p.options)) * kLog2e, cap = softcap_log2(p.options);
    float z = p.logits[chunk.first + k] * scale;
    if (cap > 0.f) z = softcapped(z / cap).tanh * cap;
    p.rows.exponent[k] = z == -INFINITY ? -FLT_MAX : rintf(z) + kTargetExponent;  // as gather_row
    p.rows.target[k] = target_in(p.slice, p.targets[row + p.shift]);
    p.rows.target_logit[k] = NAN;
    p.rows.bad[k] = 0;
  }
}

__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    shard_stats_kernel(const __grid_constant__ FusedShardStatsParams p) {
  sm90::begin_after_previous_launch();
  if (p.repair && !(*p.rows.any && p.rows.only[int64_t(blockIdx.x) * kRowsPerBlock / kRowGroup])) return;
  const ChunkRows chunk(p.chunk);
  const int64_t k = int64_t(blockIdx.x) * kRowsPerBlock + threadIdx.x % kRowsPerBlock, size = p.chunk.size;
  const bool is_live = k < chunk.live;
  const TileSums sum = sum_tiles(p.rows, p.tiles, k, is_live);
  if (threadIdx.x >= kRowsPerBlock || k >= size) return;
  float own = 0.f;
  if (is_live) {
    if (!p.repair) mark_if_bad(p.rows, k, sum.exact, p.options);
    const int32_t t = p.rows.target[k];
    own = t >= 0 ? p.rows.target_logit[k] : t == kNoClass ? NAN : 0.f;
  }
  p.stats[kShardExponent * size + k] = p.rows.exponent[k];
  p.stats[kShardSum * size + k] = float(sum.exact);
  p.stats[kShardTarget * size + k] = own;
  p.stats[kShardResidue * size + k] = float(p.options.softcap > 0 ? sum.rounded : sum.exact - sum.rounded);
  const int64_t row = chunk.row(p.chunk, k);
  if (!p.predicted || row < 0) return;
  int64_t predicted = -1;
  float largest = 0.f;
  if (is_live && p.slice.num_classes == 0) {
    predicted = INT64_MAX, largest = -INFINITY;
  } else if (is_live) {
    const float scale = float(option_logit_scale(p.options));
    float2 best = sum.best;
    if (p.rows.target[k] >= 0)
      take_larger(best, make_float2(scale > 0.f ? own : -own, __int_as_float(p.rows.target[k])));
    if (scale == 0.f) best = make_float2(0.f, __int_as_float(0));  // all logits are equal
    // A row of NaN or -inf has found none.
    predicted = p.slice.first_class + min(int64_t(__float_as_int(best.y)), p.slice.num_classes - 1), largest = best.x;
  }
  p.predicted[row] = predicted;
  p.largest[is_live ? chunk.first + k : chunk.dead + k] = largest;
}

// A thread for each slot.
__global__ void __launch_bounds__(kThreads) shard_finish_kernel(const __grid_constant__ FusedShardFinishParams p) {
  __shared__ RowConstants<float> constants;
  sm90::begin_after_previous_launch();
  if (threadIdx.x == 0) constants = row_constants<float>(p.row);
  __syncthreads();
  const ChunkRows chunk(p.chunk);
  const int64_t k = int64_t(blockIdx.x) * kThreads + threadIdx.x, size = p.chunk.size;
  const int64_t i = k < size ? chunk.row(p.chunk, k) : -1;
  if (i < 0) return;
  RowGradient found{};
  int32_t t = kOtherSlice;
  if (k < chunk.live) {
    const float* weights = static_cast<const float*>(p.row.weight);
    const int64_t target = p.row.target[i + p.row.shift];
    t = target_in(p.slice, target);
    const float target_weight = !weights ? 1.f : t == kNoClass ? NAN : weights[target];
    const float exponent = p.stats[kShardExponent * size + k];
    found = row_gradient(p.row, constants, i, exponent, p.stats[kShardSum * size + k],
                         p.stats[kShardResidue * size + k], p.stats[kShardTarget * size + k], target_weight, nullptr);
    // E of this slice may be relative to a smaller power of two: it has been repaired elsewhere only.
    found.v *= exp2f(p.own_stats[kShardExponent * size + k] - exponent);
    p.rows.g_target[chunk.first + k] = found.g;
  }
  p.rows.v[k] = found.v;
  p.rows.target[k] = t;
  static_cast<float*>(p.row.ce)[i] = found.row.ce;
  static_cast<float*>(p.row.z)[i] = found.row.z;
  if (p.row.logsumexp) static_cast<float*>(p.row.logsumexp)[i] = found.row.logsumexp;
}

__global__ void __launch_bounds__(kRowThreads) shard_scale_kernel(const __grid_constant__ FusedShardScaleParams p) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.ticket = 0;
  const ChunkRows chunk(p.chunk);
  const float alpha = gradient_factor(p.chunk.counts, p.chunk.upstream);
  const int64_t k = int64_t(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp;
  if (k < chunk.live) scale_row(p.gathered, k, p.hidden, p.v[k] * alpha);
}

// A block for each slot.
template <class Out>
__global__ void __launch_bounds__(kThreads) shard_store_kernel(const __grid_constant__ FusedShardStoreParams p) {
  const int64_t k = blockIdx.x;
  const ChunkRows chunk(p.chunk);
  const int64_t row = chunk.row(p.chunk, k);
  if (row < 0) return;
  Out* out = static_cast<Out*>(p.dx) + row * p.hidden;
  for (int64_t i = threadIdx.x; i < p.hidden / 8; i += kThreads) {
    float y[8] = {};
    if (k < chunk.live) {
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        const Pack<float> in = reinterpret_cast<const Pack<float>*>(p.sum + k * p.hidden + i * 8)[a];
#pragma unroll
        for (int e = 0; e < 4; ++e) y[a * 4 + e] = in.v[e];
      }
    }
    store8(out + i * 8, y);
  }
}

}  // namespace

cudaError_t launch_fused_shard_targets(const FusedShardTargetsParams& p, cudaStream_t stream) {
  const unsigned blocks = unsigned(p.rows);
  if (p.input_dtype == DType::f32)
    shard_targets_kernel<float><<<blocks, kThreads, 0, stream>>>(p);
  else if (p.input_dtype == DType::bf16)
    shard_targets_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(p);
  else
    return cudaErrorInvalidValue;
  return cudaGetLastError();
}

cudaError_t launch_fused_shard_gather(const FusedShardGatherParams& p, cudaStream_t stream) {
  const unsigned blocks = unsigned(p.chunk.size);
  if (p.input_dtype == DType::f32)
    return sm90::launch_dependent(shard_gather_kernel<float>, blocks, kThreads, stream, p);
  if (p.input_dtype == DType::bf16)
    return sm90::launch_dependent(shard_gather_kernel<__nv_bfloat16>, blocks, kThreads, stream, p);
  return cudaErrorInvalidValue;
}

cudaError_t launch_fused_shard_stats(const FusedShardStatsParams& p, cudaStream_t stream) {
  return sm90::launch_dependent(shard_stats_kernel, unsigned((p.chunk.size + kRowsPerBlock - 1) / kRowsPerBlock),
                                kRowThreads, stream, p);
}

cudaError_t launch_fused_shard_finish(const FusedShardFinishParams& p, cudaStream_t stream) {
  return sm90::launch_dependent(shard_finish_kernel, unsigned((p.chunk.size + kThreads - 1) / kThreads), kThreads,
                                stream, p);
}

cudaError_t launch_fused_shard_scale(const FusedShardScaleParams& p, cudaStream_t stream) {
  shard_scale_kernel<<<unsigned((p.chunk.size + kRowsPerBlock - 1) / kRowsPerBlock), kRowThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_fused_shard_store(const FusedShardStoreParams& p, cudaStream_t stream) {
  const unsigned blocks = unsigned(p.chunk.size);
  if (p.dx_dtype == DType::f32)
    shard_store_kernel<float><<<blocks, kThreads, 0, stream>>>(p);
  else if (p.dx_dtype == DType::bf16)
    shard_store_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(p);
  else
    return cudaErrorInvalidValue;
  return cudaGetLastError();
}

}  // namespace syncfree
