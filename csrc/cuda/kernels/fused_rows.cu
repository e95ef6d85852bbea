// The small kernels of the Hopper path, a row at a time: gather with the target's logit, losses from E's sums, the
// factor v into x, and the targets' share of dW through a stable sort by class.
#include <cfloat>
#include <cub/device/device_radix_sort.cuh>
#include <type_traits>

#include "../../common/formulas.h"
#include "../hopper/dependent_launch.cuh"
#include "device.cuh"
#include "fused_chunk.cuh"
#include "softcap.cuh"

namespace syncfree {
namespace {

constexpr int kThreads = 128;
constexpr float kLog2e = 1.4426950408889634f;
// The target's E is 2^-40. bfloat16 could hold classes up to 167 binary orders above it, but what follows multiplies in
// float32: past a sum of 2^60 (a loss of about 69 nats) 1 / sum times x, or E times W, could leave its range, so such a
// row is redone relative to its maximum.
constexpr float kTargetExponent = 40.f;
constexpr float kLargestSum = 1.152921504606847e18f;  // 2^60

template <class In>
__global__ void __launch_bounds__(kThreads) fused_gather_kernel(const __grid_constant__ FusedGatherParams p) {
  __shared__ float shared[kThreads / kWarp];
  __shared__ double smooth_shared[kThreads / kWarp];
  sm90::begin_after_previous_launch();
  const int64_t k = blockIdx.x;
  Pack<__nv_bfloat16>* out =
      reinterpret_cast<Pack<__nv_bfloat16>*>(static_cast<__nv_bfloat16*>(p.gathered) + k * p.hidden);
  if (threadIdx.x == 0 && k % kRowGroup == 0) p.rows.only[k / kRowGroup] = 0;
  if (threadIdx.x == 0 && k == 0) *p.rows.any = 0, *p.rows.ticket = 0;
  const ChunkRows chunk(p.chunk);
  if (k >= chunk.live) {
    for (int64_t i = threadIdx.x; i < p.hidden / 8; i += kThreads)
      reinterpret_cast<uint4*>(out)[i] = make_uint4(0, 0, 0, 0);
    const int64_t ignored = p.dx ? chunk.row(p.chunk, k) : -1;
    if (ignored >= 0) {
      const int64_t packs = p.hidden / 8 * (p.dx_dtype == DType::f32 ? 2 : 1);
      for (int64_t i = threadIdx.x; i < packs; i += kThreads)
        static_cast<uint4*>(p.dx)[ignored * packs + i] = make_uint4(0, 0, 0, 0);
    }
    if (threadIdx.x == 0) p.rows.exponent[k] = 0.f, p.rows.target[k] = -1, p.rows.bad[k] = 0;
    return;
  }
  const int64_t row = chunk.row(p.chunk, k), t = p.targets[row + p.shift];
  const bool known = t >= 0 && t < p.num_classes;
  const In* x = static_cast<const In*>(p.input) + row * p.input_pitch;
  const Pack<__nv_bfloat16>* w = reinterpret_cast<const Pack<__nv_bfloat16>*>(
      static_cast<const __nv_bfloat16*>(p.weight) + (known ? t : 0) * p.weight_pitch);
  float dot = 0.f;
  double smooth = 0;
  for (int64_t i = threadIdx.x; i < p.hidden / 8; i += kThreads) {
    Pack<__nv_bfloat16> a;
    load_bf16x8(x, i, a);
    out[i] = a;
    const Pack<__nv_bfloat16> b = w[i];
#pragma unroll
    for (int e = 0; e < 8; ++e) dot = fmaf(to_float(a.v[e]), to_float(b.v[e]), dot);
    if (!p.smooth.w) continue;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4 u = reinterpret_cast<const float4*>(p.smooth.w)[i * 2 + h];
      smooth += double(to_float(a.v[h * 4]) * u.x + to_float(a.v[h * 4 + 1]) * u.y + to_float(a.v[h * 4 + 2]) * u.z +
                       to_float(a.v[h * 4 + 3]) * u.w);
    }
  }
  dot = block_reduce<kThreads>(dot, Sum(), shared);
  if (p.smooth.w) smooth = block_reduce<kThreads>(smooth, Sum(), smooth_shared);
  if (threadIdx.x == 0) {
    const float scale = float(option_logit_scale(p.options)) * kLog2e, cap = softcap_log2(p.options);
    float z = dot + (p.bias && known ? p.bias[t] : 0.f);
    z = cap > 0.f ? softcapped(z * scale / cap).tanh * cap : z * scale;
    // An exponent of -inf would make NaN of the classes that are -inf as well.
    p.rows.exponent[k] = !known ? NAN : z == -INFINITY ? -FLT_MAX : rintf(z) + kTargetExponent;
    p.rows.target[k] = known ? int32_t(t) : -1;
    p.rows.target_logit[k] = NAN;
    if (p.smooth.w) p.rows.smooth[k] = smooth + (p.smooth.bias ? *p.smooth.bias : 0.0);
    p.rows.bad[k] = 0;
  }
}

constexpr int kRowsPerBlock = 32, kSlices = 8;

// 32 rows a block, 8 slices of tiles each; slices are added in order.
__device__ __forceinline__ void finish_rows(const FusedFinishParams& p, const ChunkRows& chunk) {
  __shared__ double exact_sums[kSlices][kRowsPerBlock], rounded_sums[kSlices][kRowsPerBlock];
  __shared__ float2 best_of[kSlices][kRowsPerBlock];
  __shared__ RowConstants<float> constants;
  const int lane = threadIdx.x % kRowsPerBlock, slice = threadIdx.x / kRowsPerBlock;
  const int64_t k = int64_t(blockIdx.x) * kRowsPerBlock + lane, live = chunk.live;
  if (threadIdx.x == 0) constants = row_constants<float>(p.row);
  double exact = 0, rounded = 0;
  float2 best = make_float2(-INFINITY, __int_as_float(INT32_MAX));
  const auto take = [&](float2 other) {
    const bool larger = other.x > best.x || (other.x == best.x && __float_as_int(other.y) < __float_as_int(best.y));
    if (larger) best = other;
  };
  if (k < live && p.rows.best) {
    const float2* found = static_cast<const float2*>(p.rows.best);
    for (int64_t t = slice; t < p.tiles; t += kSlices) take(found[t * p.chunk.size + k]);
  }
  if (k < live) {
    const float2* sums = static_cast<const float2*>(p.rows.sums);
    for (int64_t t = slice; t < p.tiles; t += kSlices) {
      const float2 s = sums[t * p.chunk.size + k];
      exact += double(s.x), rounded += double(s.y);
    }
  }
  exact_sums[slice][lane] = exact;
  rounded_sums[slice][lane] = rounded;
  best_of[slice][lane] = best;
  __syncthreads();
  const int64_t i = k < p.chunk.size ? chunk.row(p.chunk, k) : -1;
  if (slice != 0 || i < 0) return;
  for (int s = 1; s < kSlices; ++s) {
    exact += exact_sums[s][lane], rounded += rounded_sums[s][lane];
    take(best_of[s][lane]);
  }
  RowResult<float> r{};
  float v = 0.f, g = 0.f, correct = 0.f;
  int predicted = -1;
  if (k < live) {
    const float exponent = p.rows.exponent[k], z = p.rows.target_logit[k], scale = constants.logit_scale * kLog2e,
                cap = softcap_log2(p.row.options);
    if (!p.repair && exact > double(kLargestSum)) {
      p.rows.bad[k] = 1;
      p.rows.only[k / kRowGroup] = 1;
      *p.rows.any = 1;
    }
    // Relative to the target where that fits a float, which keeps the digits of small losses; else relative to the
    // row's exponent.
    const float capped = cap > 0.f ? softcapped(z * scale / cap).tanh : 0.f;
    const float above = cap > 0.f    ? fmaf(-capped, cap, exponent)
                        : p.row.bias ? exponent - __fmul_rn(z, scale)  // as E has it
                                     : fmaf(-z, scale, exponent),
                logit = cap > 0.f ? capped * constants.softcap : z * constants.logit_scale;
    // Without other classes nothing is far below or above: where logits are huge, 2^above may be infinite.
    const double relative = exact == 0 ? 0 : exact * exp2(double(above));
    const bool by_target = !(relative > 1e30);
    const double smooth =
        p.rows.smooth ? p.rows.smooth[k] * constants.logit_scale - p.chunk.counts[kCountClasses] * smooth_base(logit)
                      : 0.0;
    const RowStats<float> stats{by_target ? logit : exponent / kLog2e, float(by_target ? relative : exact), logit,
                                float(smooth)};
    const float multiplier = p.row.token_weight ? static_cast<const float*>(p.row.token_weight)[i + p.row.shift] : 1.f;
    const float upstream = p.row.upstream ? static_cast<const float*>(p.row.upstream)[i * p.row.upstream_stride] : 1.f;
    const int target = p.rows.target[k];
    const float* weights = static_cast<const float*>(p.row.weight);
    const float target_weight = !weights ? 1.f : target >= 0 ? weights[target] : NAN;
    r = row_result(stats, constants, target_weight, multiplier, upstream);
    v = by_target && exact != 0 ? r.slope * exp2f(above) : r.slope;
    if (cap > 0.f) r.target *= softcap_slope(z * constants.logit_scale, constants.softcap);
    if (p.rows.best) {
      // A scale of 0 makes all logits equal, and the first class wins.
      if (scale == 0.f) best = make_float2(0.f, __int_as_float(target == 0 && p.row.num_classes > 1 ? 1 : 0));
      if (target >= 0) take(make_float2(scale == 0.f ? 0.f : scale > 0.f ? z : -z, __int_as_float(target)));
      const int found = __float_as_int(best.y), last = int(p.row.num_classes) - 1;
      predicted = found < last ? found : last;  // a row of NaN or -inf has found none
      correct = predicted == target ? 1.f : 0.f;
    }
    // The target takes what rounding E left over, so that the row of gradients sums to what it should.
    g = r.target + v * float(cap > 0.f ? rounded : exact - rounded);
    // Smoothing's share is taken off all classes at once, the target included, which r.target has without it.
    if (p.rows.smooth) g = fmaf(r.offset, target_weight, g);
  }
  p.rows.v[k] = v;
  if (k < live) p.rows.g_target[chunk.first + k] = g;
  if (k < live && p.rows.offset) p.rows.offset[chunk.first + k] = r.offset;
  if (p.row.ce) static_cast<float*>(p.row.ce)[i] = r.ce;
  if (p.row.z) static_cast<float*>(p.row.z)[i] = r.z;
  if (p.row.logsumexp) static_cast<float*>(p.row.logsumexp)[i] = r.logsumexp;
  if (p.row.correct) p.row.correct[i] = correct;
  if (p.row.predicted) p.row.predicted[i] = predicted;
}

// What the dW product reads: rows of x times v, a warp a row.
__device__ __forceinline__ void scale_rows(const FusedFinishParams& p, const ChunkRows& chunk) {
  const float alpha = gradient_factor(p.chunk.counts, p.chunk.upstream);
  for (int r = threadIdx.x / kWarp; r < kRowsPerBlock; r += kSlices) {
    const int64_t k = int64_t(blockIdx.x) * kRowsPerBlock + r;
    if (k >= chunk.live) return;
    const float factor = p.rows.v[k] * alpha;
    Pack<__nv_bfloat16>* x =
        reinterpret_cast<Pack<__nv_bfloat16>*>(static_cast<__nv_bfloat16*>(p.gathered) + k * p.hidden);
    constexpr int kBatch = 4;  // loads in flight
    for (int64_t i = threadIdx.x % kWarp; i < p.hidden / 8; i += kBatch * kWarp) {
      Pack<__nv_bfloat16> a[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
        if (i + b * kWarp < p.hidden / 8) a[b] = x[i + b * kWarp];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (i + b * kWarp >= p.hidden / 8) break;
#pragma unroll
        for (int e = 0; e < 8; ++e) a[b].v[e] = __float2bfloat16_rn(to_float(a[b].v[e]) * factor);
        x[i + b * kWarp] = a[b];
      }
    }
  }
}

__global__ void __launch_bounds__(kRowsPerBlock* kSlices)
    fused_finish_kernel(const __grid_constant__ FusedFinishParams p) {
  sm90::begin_after_previous_launch();
  const ChunkRows chunk(p.chunk);
  // A group is repaired as a whole; kRowGroup is a multiple of the block's rows.
  if (!p.repair || (*p.rows.any && p.rows.only[int64_t(blockIdx.x) * kRowsPerBlock / kRowGroup])) finish_rows(p, chunk);
  if (!p.repair || !p.gathered) return;
  __syncthreads();  // v may be new
  scale_rows(p, chunk);
}

__device__ __forceinline__ int32_t sort_key(const FusedSortParams& p, int64_t i) {
  int64_t t = p.num_classes;
  if (i < int64_t(p.counts[kCountRows])) {
    t = p.targets[p.row_index[i] + p.shift];
    if (t < 0 || t > p.num_classes) t = p.num_classes;
  }
  return int32_t(t);
}

__device__ __forceinline__ void mark_bounds(const FusedSortParams& p, int64_t i) {
  const int32_t key = p.keys[i];
  if (key >= p.num_classes) return;
  if (i == 0 || p.keys[i - 1] != key) p.starts[key] = int32_t(i);
  if (i == p.rows - 1 || p.keys[i + 1] != key) p.ends[key] = int32_t(i + 1);
}

// A stable sort by counting: a row's place is the number of rows that belong before it. Each row is compared with each,
// which up to this many takes less time than the launches of a radix sort.
constexpr int kRankThreads = 256, kRankRows = 64, kRankSlices = kRankThreads / kRankRows, kRankTile = 4096;
constexpr int64_t kMostRanked = 16384;

__global__ void __launch_bounds__(kRankThreads) sort_by_rank_kernel(FusedSortParams p) {
  __shared__ int4 tile[kRankTile / 4];
  __shared__ int counted[kRankSlices][kRankRows];
  sm90::begin_after_previous_launch();
  const int lane = threadIdx.x % kRankRows, slice = threadIdx.x / kRankRows;
  const int64_t first = int64_t(blockIdx.x) * kRankRows, i = first + lane;
  const int32_t own = i < p.rows ? p.keys_in[i] : INT32_MAX;
  for (int64_t c = int64_t(blockIdx.x) * kRankThreads + threadIdx.x; c < p.num_classes;
       c += int64_t(gridDim.x) * kRankThreads)
    p.starts[c] = -1;
  int before = 0;
  for (int64_t begin = 0; begin < p.rows; begin += kRankTile) {
    __syncthreads();
#pragma unroll
    for (int j = threadIdx.x; j < kRankTile; j += kRankThreads)
      reinterpret_cast<int32_t*>(tile)[j] = begin + j < p.rows ? p.keys_in[begin + j] : INT32_MAX;
    __syncthreads();
    constexpr int kEach = kRankTile / 4 / kRankSlices;
#pragma unroll 4
    for (int q = slice * kEach; q < (slice + 1) * kEach; ++q) {
      const int64_t j = begin + 4 * q;
      const int4 x = tile[q];
      if (j < first || j >= first + kRankRows) {
        const int32_t bound = own + (j < first);
        before += (x.x < bound) + (x.y < bound) + (x.z < bound) + (x.w < bound);
      } else {
        before +=
            (x.x < own + (j < i)) + (x.y < own + (j + 1 < i)) + (x.z < own + (j + 2 < i)) + (x.w < own + (j + 3 < i));
      }
    }
  }
  counted[slice][lane] = before;
  __syncthreads();
  if (slice != 0 || i >= p.rows) return;
  for (int s = 1; s < kRankSlices; ++s) before += counted[s][lane];
  p.keys[before] = own;
  p.positions[before] = int32_t(i);
}

__global__ void __launch_bounds__(kThreads) sort_keys_kernel(FusedSortParams p) {
  sm90::begin_after_previous_launch();
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.rows) return;
  p.keys_in[i] = sort_key(p, i);
  p.positions_in[i] = int32_t(i);
}

__global__ void __launch_bounds__(kThreads) sort_starts_kernel(FusedSortParams p) {
  sm90::begin_after_previous_launch();
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < p.rows) mark_bounds(p, i);
}

// Eight sums of one class from 16 bits in place and 8 in `low`, as hopper/split_accumulator.cuh left them.
__device__ __forceinline__ void read_split(const uint8_t* low, const __nv_bfloat16* high, int64_t c, int64_t i,
                                           int64_t hidden, float (&y)[8]) {
  const int64_t col = i * 8, tile = (c >> 6) * (hidden / 128) + col / 128;
  const int group = int(col % 128) / 8, upper = int(c >> 3) & 1, lane = int(c & 7) * 4, warp = int(c & 63) >> 4;
  const uint8_t* at =
      low + tile * (64 * 128) + warp * (16 * 128) + (group / 4) * 512 + lane * 16 + (group % 4) * 4 + upper * 2;
  const uint4 h = reinterpret_cast<const uint4*>(high)[i];
  const uint32_t halves[4] = {h.x, h.y, h.z, h.w};
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const uint32_t bytes = *reinterpret_cast<const uint16_t*>(at + q * 16);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint32_t byte = (bytes >> (8 * e)) & 0xffu, half = (halves[q] >> (16 * e)) & 0xffffu;
      y[q * 2 + e] = __uint_as_float(((half - (byte >> 7)) << 16) | (byte << 8));
    }
  }
}

// Eight columns of one class: a thread keeps them while it walks the class's rows in order.
template <class In, class SumT, class Out>
__device__ __forceinline__ void add_rows_of(const FusedTargetsParams& p, int64_t c, int32_t start, int64_t i) {
  const float alpha = gradient_factor(p.counts, p.upstream);
  const SumT* sum = static_cast<const SumT*>(p.sum) + c * p.hidden;
  Out* out = static_cast<Out*>(p.out) + c * p.hidden;
  float y[8];
  bool read = false;
  if constexpr (std::is_same_v<SumT, __nv_bfloat16>)
    if ((read = p.low != nullptr)) read_split(p.low, sum, c, i, p.hidden, y);
  if (!read) {
#pragma unroll
    for (int a = 0; a < 8 / Pack<SumT>::kSize; ++a) {
      const Pack<SumT> s = reinterpret_cast<const Pack<SumT>*>(sum + i * 8)[a];
#pragma unroll
      for (int e = 0; e < Pack<SumT>::kSize; ++e) y[a * Pack<SumT>::kSize + e] = to_float(s.v[e]);
    }
  }
  if (start >= 0) {
    const int32_t end = p.ends[c];
#pragma unroll 4
    for (int32_t j = start; j < end; ++j) {
      const int32_t position = p.positions[j];
      const float g = p.g_target[position] * alpha;
      Pack<__nv_bfloat16> x;
      load_bf16x8(static_cast<const In*>(p.input) + p.row_index[position] * p.input_pitch, i, x);
#pragma unroll
      for (int e = 0; e < 8; ++e) y[e] = fmaf(g, to_float(x.v[e]), y[e]);
    }
  }
  if (p.smooth) subtract8((p.class_weight ? p.class_weight[c] : 1.f) * alpha, p.smooth, i, y);
  store8(out + i * 8, y);
}

// blockIdx.x is a class, or in place, where classes without rows stay as they are, a place among the sorted rows.
template <class In, class SumT, class Out, bool kInPlace>
__global__ void __launch_bounds__(kThreads) fused_targets_kernel(const __grid_constant__ FusedTargetsParams p) {
  const int64_t i = int64_t(blockIdx.y) * kThreads + threadIdx.x;
  if constexpr (kInPlace) {
    const int32_t j = int32_t(blockIdx.x), c = p.keys[j];
    if (c >= p.num_classes || (j > 0 && p.keys[j - 1] == c) || i >= p.hidden / 8) return;
    add_rows_of<In, SumT, Out>(p, c, j, i);
  } else {
    if (i < p.hidden / 8) add_rows_of<In, SumT, Out>(p, blockIdx.x, p.starts[blockIdx.x], i);
  }
}

template <class In, class SumT, class Out>
cudaError_t launch_targets(const FusedTargetsParams& p, cudaStream_t stream) {
  const unsigned columns = unsigned((p.hidden / 8 + kThreads - 1) / kThreads);
  if constexpr (std::is_same_v<SumT, Out>) {
    if (p.sum == p.out && !p.smooth) {
      fused_targets_kernel<In, SumT, Out, true><<<dim3(unsigned(p.rows), columns), kThreads, 0, stream>>>(p);
      return cudaGetLastError();
    }
  }
  fused_targets_kernel<In, SumT, Out, false><<<dim3(unsigned(p.num_classes), columns), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <class In>
cudaError_t launch_targets_of(const FusedTargetsParams& p, cudaStream_t stream) {
  if (p.sum_dtype == DType::f32 && p.out_dtype == DType::f32) return launch_targets<In, float, float>(p, stream);
  if (p.sum_dtype == DType::f32 && p.out_dtype == DType::bf16)
    return launch_targets<In, float, __nv_bfloat16>(p, stream);
  if (p.sum_dtype == DType::bf16 && p.out_dtype == DType::bf16)
    return launch_targets<In, __nv_bfloat16, __nv_bfloat16>(p, stream);
  return cudaErrorInvalidValue;
}

unsigned blocks_of(int64_t n) {
  return unsigned((n + kThreads - 1) / kThreads);
}

int key_bits(int64_t num_classes) {
  int bits = 1;
  while ((int64_t(1) << bits) <= num_classes) ++bits;
  return bits;
}

}  // namespace

bool fused_supported_device() {
  int device = 0, major = 0, minor = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 &&
         minor == 0;
}

cudaError_t launch_fused_gather(const FusedGatherParams& p, cudaStream_t stream) {
  const unsigned blocks = unsigned(p.chunk.size);
  switch (p.input_dtype) {
    case DType::f32:
      return sm90::launch_dependent(fused_gather_kernel<float>, blocks, kThreads, stream, p);
    case DType::bf16:
      return sm90::launch_dependent(fused_gather_kernel<__nv_bfloat16>, blocks, kThreads, stream, p);
    case DType::f16:
      return sm90::launch_dependent(fused_gather_kernel<__half>, blocks, kThreads, stream, p);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t launch_fused_finish(const FusedFinishParams& p, cudaStream_t stream) {
  return sm90::launch_dependent(fused_finish_kernel, unsigned((p.chunk.size + kRowsPerBlock - 1) / kRowsPerBlock),
                                kRowsPerBlock * kSlices, stream, p);
}

size_t fused_sort_scratch_bytes(int64_t rows, int64_t num_classes) {
  if (rows <= kMostRanked) return 0;
  size_t bytes = 0;
  const int32_t* in = nullptr;
  int32_t* out = nullptr;
  cub::DeviceRadixSort::SortPairs(nullptr, bytes, in, out, in, out, int(rows), 0, key_bits(num_classes));
  return bytes;
}

cudaError_t launch_fused_sort(const FusedSortParams& p, cudaStream_t stream) {
  if (cudaError_t e = sm90::launch_dependent(sort_keys_kernel, blocks_of(p.rows), kThreads, stream, p)) return e;
  if (p.rows <= kMostRanked) {
    const unsigned blocks = unsigned((p.rows + kRankRows - 1) / kRankRows);
    if (cudaError_t e = sm90::launch_dependent(sort_by_rank_kernel, blocks, kRankThreads, stream, p)) return e;
    return sm90::launch_dependent(sort_starts_kernel, blocks_of(p.rows), kThreads, stream, p);
  }
  if (cudaError_t e = cudaMemsetAsync(p.starts, 0xff, size_t(p.num_classes) * sizeof(int32_t), stream)) return e;
  size_t bytes = p.scratch_bytes;
  if (cudaError_t e = cub::DeviceRadixSort::SortPairs(p.scratch, bytes, p.keys_in, p.keys, p.positions_in, p.positions,
                                                      int(p.rows), 0, key_bits(p.num_classes), stream))
    return e;
  return sm90::launch_dependent(sort_starts_kernel, blocks_of(p.rows), kThreads, stream, p);
}

cudaError_t launch_fused_targets(const FusedTargetsParams& p, cudaStream_t stream) {
  switch (p.input_dtype) {
    case DType::f32:
      return launch_targets_of<float>(p, stream);
    case DType::bf16:
      return launch_targets_of<__nv_bfloat16>(p, stream);
    case DType::f16:
      return launch_targets_of<__half>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace syncfree
