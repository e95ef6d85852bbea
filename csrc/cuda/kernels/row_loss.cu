// Cross-entropy of rows of logits: statistics, loss and, in place or elsewhere, the gradient of the logits. formulas.h
// has the mathematics; a block takes a row.
//
// Pass 1 keeps a running maximum and sum a thread over tiles of kTile elements, and combines them in a fixed order.
// Pass 2 reads the row again and writes g. Bytes an element: 4 + 4 + 2 for float logits and a bfloat16 gradient.
//
// g over the logits' own memory: element j of g lies at or before element j of the logits, so a tile may be written
// once all threads have read it, and every tile before it has been read by then. One barrier a tile, between reading
// and writing, is enough.
#include <cmath>
#include <type_traits>

#include "../../common/formulas.h"
#include "device.cuh"
#include "launch.h"

namespace syncfree {
namespace {

constexpr int kThreads = 512;
constexpr int kEach = 16;  // elements a thread holds of a tile
constexpr int kTile = kThreads * kEach;
constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// e^(x - m); the difference is rounded before it is scaled, so that large common offsets cost no digits.
__device__ __forceinline__ float exp_minus(float x, float m) {
  return exp2_fast((x - m) * kLog2e);
}

// A row seen as 16-byte packs. Index 0 is the first element; packs begin at -skew, so that they are aligned whatever
// the row is.
template <class T>
struct Row {
  T* data;
  int skew;
  __device__ __forceinline__ explicit Row(T* p)
      : data(p), skew(int((reinterpret_cast<uintptr_t>(p) & 15) / sizeof(T))) {}
};

// v[u * kVec + e] is element tile + (u * kThreads + thread) * kVec + e.
template <class T>
__device__ __forceinline__ void load_tile(const Row<const T>& row, int64_t tile, int64_t n, float (&v)[kEach]) {
  constexpr int kVec = Pack<T>::kSize, kPacks = kEach / kVec;
  Pack<T> x[kPacks];
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const int64_t j = tile + (u * kThreads + int(threadIdx.x)) * kVec;
    if (j >= 0 && j + kVec <= n) {
      x[u] = *reinterpret_cast<const Pack<T>*>(row.data + j);
    } else {
#pragma unroll
      for (int e = 0; e < kVec; ++e) x[u].v[e] = j + e >= 0 && j + e < n ? row.data[j + e] : from_float<T>(-INFINITY);
    }
  }
#pragma unroll
  for (int u = 0; u < kPacks; ++u)
#pragma unroll
    for (int e = 0; e < kVec; ++e) v[u * kVec + e] = to_float(x[u].v[e]);
}

// in_vec: elements of a pack of the logits, which fixes who holds what.
template <int kInVec, class T>
__device__ __forceinline__ void store_tile(T* row, bool aligned, int64_t tile, int64_t n, const float (&v)[kEach]) {
  constexpr int kPacks = kEach / kInVec;
  struct alignas(kInVec * sizeof(T)) Run {
    T v[kInVec];
  };
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const int64_t j = tile + (u * kThreads + int(threadIdx.x)) * kInVec;
    Run y;
#pragma unroll
    for (int e = 0; e < kInVec; ++e) y.v[e] = from_float<T>(v[u * kInVec + e]);
    if (aligned && j >= 0 && j + kInVec <= n) {
      *reinterpret_cast<Run*>(row + j) = y;
    } else {
#pragma unroll
      for (int e = 0; e < kInVec; ++e)
        if (j + e >= 0 && j + e < n) row[j + e] = y.v[e];
    }
  }
}

// Statistics of part of a row. The target itself takes no part in max, sum and smooth.
struct Partial {
  float max, sum, smooth;
  float best;  // argmax
  int best_at;
};

__device__ __forceinline__ Partial combine(const Partial& a, const Partial& b) {
  Partial r;
  r.max = fmaxf(a.max, b.max);
  const float base = r.max == -INFINITY ? 0.f : r.max;
  r.sum = a.sum * exp_minus(a.max, base) + b.sum * exp_minus(b.max, base);
  r.smooth = a.smooth + b.smooth;
  const bool take = b.best > a.best || (b.best == a.best && b.best_at < a.best_at);
  r.best = take ? b.best : a.best;
  r.best_at = take ? b.best_at : a.best_at;
  return r;
}

__device__ __forceinline__ Partial shuffle(const Partial& a, int offset) {
  return {__shfl_xor_sync(0xffffffffu, a.max, offset), __shfl_xor_sync(0xffffffffu, a.sum, offset),
          __shfl_xor_sync(0xffffffffu, a.smooth, offset), __shfl_xor_sync(0xffffffffu, a.best, offset),
          __shfl_xor_sync(0xffffffffu, a.best_at, offset)};
}

// From a stored logit to s = logit_scale (z + b), and to the final l.
template <bool kGeneral>
struct Transform {
  float scale, softcap;
  const float* bias;
  __device__ __forceinline__ float scaled(float z, int64_t j) const {
    if constexpr (kGeneral)
      if (bias) z += bias[j];
    return z * scale;
  }
  __device__ __forceinline__ float capped(float s) const {
    if constexpr (kGeneral)
      if (softcap > 0.f) return softcap * tanhf(s / softcap);
    return s;
  }
};

// kGeneral: bias, softcap, class weights, label smoothing or argmax.
template <class In, class Out, bool kGeneral>
__global__ void __launch_bounds__(kThreads, 2) row_loss_kernel(const __grid_constant__ RowParams p) {
  __shared__ Partial parts[kThreads / kWarp];
  __shared__ RowResult<float> shared_result;
  __shared__ RowConstants<float> constants;
  __shared__ float lost[kThreads / kWarp];

  const int64_t k = blockIdx.x, i = p.chunk.row_index[p.chunk.first + k], n = p.num_classes;
  const int64_t at = p.by_row_index ? i : k;
  Out* grad = p.grad ? static_cast<Out*>(p.grad) + at * p.grad_pitch : nullptr;
  if (k >= live_rows(p.chunk)) {
    if (grad) {
      constexpr int kVec = Pack<Out>::kSize;
      const bool aligned = is_aligned(grad);
      if (aligned)
        for (int64_t j = threadIdx.x; j < n / kVec; j += kThreads)
          reinterpret_cast<uint4*>(grad)[j] = make_uint4(0, 0, 0, 0);
      for (int64_t j = (aligned ? n / kVec * kVec : 0) + threadIdx.x; j < n; j += kThreads)
        grad[j] = from_float<Out>(0.f);
    }
    if (threadIdx.x == 0) {
      if (p.ce) static_cast<float*>(p.ce)[i] = 0.f;
      if (p.z) static_cast<float*>(p.z)[i] = 0.f;
      if (p.correct) p.correct[i] = 0.f;
      if (p.predicted) p.predicted[i] = -1;
      if (p.logsumexp) static_cast<float*>(p.logsumexp)[i] = 0.f;
      if (p.row_stats && !p.read_stats) reinterpret_cast<float4*>(p.row_stats)[at] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (p.residue) static_cast<float*>(p.residue)[k] = 0.f;
    }
    return;
  }

  if (threadIdx.x == 0) constants = row_constants<float>(p);
  const Row<const In> row(static_cast<const In*>(p.logits) + at * p.logits_pitch);
  const float* all_weights = static_cast<const float*>(p.weight);
  const float* weight = all_weights ? all_weights + p.first_class : nullptr;
  const int64_t target = p.target[i + p.shift];
  const bool valid = target >= 0 && target < p.total_classes;
  // Among the classes of these logits; t is its place there, or matches none.
  const bool known = valid && target >= p.first_class && target - p.first_class < n;
  const int64_t t = known ? target - p.first_class : -1;
  __syncthreads();
  const Transform<kGeneral> transform{constants.logit_scale, constants.softcap, static_cast<const float*>(p.bias)};
  const bool smoothing = kGeneral && constants.smoothing > 0.f;

  RowStats<float> stats;
  Partial own{-INFINITY, 0.f, 0.f, -INFINITY, INT32_MAX};
  if (p.read_stats) {
    const float4 s = reinterpret_cast<const float4*>(p.row_stats)[at];
    stats = {s.x, s.y, s.z, s.w};
  } else {
    const int64_t anchor = known ? t : 0;  // logits are summed relative to its own
    const float target_logit =
        valid && n > 0 ? transform.capped(transform.scaled(to_float(row.data[anchor]), anchor)) : NAN;
    const float base = smooth_base(target_logit);
    for (int64_t tile = -row.skew; tile < n; tile += kTile) {
      float v[kEach];
      load_tile(row, tile, n, v);
      constexpr int kVec = Pack<In>::kSize;
      float largest = own.max;
#pragma unroll
      for (int u = 0; u < kEach / kVec; ++u) {
        const int64_t j0 = tile + (u * kThreads + int(threadIdx.x)) * kVec;
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          const int64_t j = j0 + e;
          float& x = v[u * kVec + e];
          if constexpr (kGeneral) {
            if (j < 0 || j >= n) continue;
            x = transform.capped(transform.scaled(x, j));
            if (x > own.best || own.best_at == INT32_MAX) own.best = x, own.best_at = int(j);
            if (smoothing && j != t) {
              const float c = weight ? weight[j] : 1.f;
              if (c != 0.f) own.smooth += c * (x - base);
            }
          } else {
            // A padding lane holds -inf and must keep it, also under a negative scale.
            x = j >= 0 && j < n ? transform.scaled(x, j) : -INFINITY;
          }
          if (j == t) x = -INFINITY;
          largest = fmaxf(largest, x);
        }
      }
      const float m = largest == -INFINITY ? 0.f : largest;
      float sum = own.sum * exp_minus(own.max, m);
#pragma unroll
      for (int e = 0; e < kEach; ++e) sum += exp_minus(v[e], m);
      own.sum = sum;
      own.max = largest;
    }
#pragma unroll
    for (int offset = kWarp / 2; offset; offset /= 2) own = combine(own, shuffle(own, offset));
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = own;
    __syncthreads();
    own = parts[0];
#pragma unroll
    for (int w = 1; w < kThreads / kWarp; ++w) own = combine(own, parts[w]);
    stats = {own.max, own.sum, target_logit, own.smooth};
    if (smoothing && known && base != target_logit) {
      const float c = weight ? weight[t] : 1.f;
      if (c != 0.f) stats.smooth += c * target_logit;
    }
  }

  if (threadIdx.x == 0) {
    const float multiplier = p.token_weight ? static_cast<const float*>(p.token_weight)[i + p.shift] : 1.f;
    const float upstream = p.upstream ? static_cast<const float*>(p.upstream)[i * p.upstream_stride] : 1.f;
    const float target_weight = !all_weights ? 1.f : valid ? all_weights[target] : NAN;
    const RowResult<float> r = row_result(stats, constants, target_weight, multiplier, upstream);
    shared_result = r;
    if (p.ce) static_cast<float*>(p.ce)[i] = r.ce;
    if (p.z) static_cast<float*>(p.z)[i] = r.z;
    if (p.logsumexp) static_cast<float*>(p.logsumexp)[i] = r.logsumexp;
    if (p.correct) p.correct[i] = own.best_at == t ? 1.f : 0.f;
    if (p.predicted) p.predicted[i] = own.best_at + p.first_class;
    if (p.row_stats && !p.read_stats)
      reinterpret_cast<float4*>(p.row_stats)[at] =
          make_float4(stats.max_other, stats.sum_other, stats.target_logit, stats.smooth);
  }
  if (!grad) return;
  __syncthreads();
  const RowResult<float> r = shared_result;
  constexpr int kVec = Pack<In>::kSize;
  const bool aligned = ((reinterpret_cast<uintptr_t>(grad) - row.skew * sizeof(Out)) & (kVec * sizeof(Out) - 1)) == 0;
  float rest = 0.f;
  for (int64_t tile = -row.skew; tile < n; tile += kTile) {
    float v[kEach];
    load_tile(row, tile, n, v);
    __syncthreads();  // the whole tile has been read
#pragma unroll
    for (int u = 0; u < kEach / kVec; ++u) {
      const int64_t j0 = tile + (u * kThreads + int(threadIdx.x)) * kVec;
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const int64_t j = j0 + e;
        float& x = v[u * kVec + e];
        if (j < 0 || j >= n) {
          x = 0.f;  // not stored, but part of what rounding takes
          continue;
        }
        if constexpr (kGeneral) {
          const float s = transform.scaled(x, j), l = transform.capped(s);
          float g = r.slope * exp_minus(l, r.shift);
          if (r.offset != 0.f) g -= r.offset * (weight ? weight[j] : 1.f);
          if (j == t) g = r.target;
          if (constants.softcap > 0.f) g *= softcap_slope(s, constants.softcap);
          x = g;
        } else {
          x = j == t ? r.target : r.slope * exp_minus(transform.scaled(x, j), r.shift);
        }
      }
    }
    if constexpr (!std::is_same_v<Out, float>) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) rest += v[e] - to_float(from_float<Out>(v[e]));
    }
    store_tile<kVec>(grad, aligned, tile, n, v);
  }
  if (!p.residue) return;
  rest = block_reduce<kThreads>(rest, Sum(), lost);
  if (threadIdx.x == 0) static_cast<float*>(p.residue)[k] = rest;
}

template <class In, class Out>
cudaError_t launch(const RowParams& p, cudaStream_t stream) {
  const bool general =
      p.bias || p.weight || p.options.softcap > 0 || p.options.label_smoothing > 0 || p.correct || p.predicted;
  const unsigned blocks = unsigned(p.chunk.size);
  if (general)
    row_loss_kernel<In, Out, true><<<blocks, kThreads, 0, stream>>>(p);
  else
    row_loss_kernel<In, Out, false><<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_rows(const RowParams& p, cudaStream_t stream) {
  if (p.acc != DType::f32) return cudaErrorInvalidValue;
  const DType grad = p.grad ? p.grad_dtype : p.logits_dtype;
  if (p.logits_dtype == DType::f32) {
    if (grad == DType::f32) return launch<float, float>(p, stream);
    if (grad == DType::bf16) return launch<float, __nv_bfloat16>(p, stream);
    if (grad == DType::f16) return launch<float, __half>(p, stream);
  }
  if (p.logits_dtype == DType::bf16 && grad == DType::bf16) return launch<__nv_bfloat16, __nv_bfloat16>(p, stream);
  if (p.logits_dtype == DType::f16 && grad == DType::f16) return launch<__half, __half>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace syncfree
