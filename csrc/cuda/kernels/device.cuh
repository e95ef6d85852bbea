// What every kernel needs: 16-byte packs, block reductions in a fixed order, the live rows of a chunk.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../common/params.h"

namespace syncfree {

constexpr int kWarp = 32;

template <class T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T v[kSize];
};

__device__ __forceinline__ float to_float(float x) {
  return x;
}
__device__ __forceinline__ float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ __forceinline__ float to_float(__half x) {
  return __half2float(x);
}

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

// Columns 8 i to 8 i + 7 of x, rounded to bfloat16.
template <class In>
__device__ __forceinline__ void load_bf16x8(const In* x, int64_t i, Pack<__nv_bfloat16>& out) {
#pragma unroll
  for (int a = 0; a < 8 / Pack<In>::kSize; ++a) {
    const Pack<In> in = reinterpret_cast<const Pack<In>*>(x + i * 8)[a];
#pragma unroll
    for (int e = 0; e < Pack<In>::kSize; ++e) out.v[a * Pack<In>::kSize + e] = __float2bfloat16_rn(to_float(in.v[e]));
  }
}

// y -= factor * columns 8 i to 8 i + 7 of x, which is aligned to 16 bytes.
__device__ __forceinline__ void subtract8(float factor, const float* x, int64_t i, float (&y)[8]) {
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    const Pack<float> in = reinterpret_cast<const Pack<float>*>(x + i * 8)[a];
#pragma unroll
    for (int e = 0; e < 4; ++e) y[a * 4 + e] = fmaf(-factor, in.v[e], y[a * 4 + e]);
  }
}

// Eight columns as 16 or 32 bytes.
template <class Out>
__device__ __forceinline__ void store8(Out* out, const float (&y)[8]) {
#pragma unroll
  for (int b = 0; b < 8 / Pack<Out>::kSize; ++b) {
    Pack<Out> z;
#pragma unroll
    for (int e = 0; e < Pack<Out>::kSize; ++e) z.v[e] = from_float<Out>(y[b * Pack<Out>::kSize + e]);
    reinterpret_cast<Pack<Out>*>(out)[b] = z;
  }
}

__device__ __forceinline__ int64_t live_rows(const Chunk& c) {
  const int64_t left = static_cast<int64_t>(c.counts[kCountRows]) - c.first;
  return left < 0 ? 0 : left > c.size ? c.size : left;
}

template <class T>
__device__ __forceinline__ bool is_aligned(const T* p) {
  return (reinterpret_cast<uintptr_t>(p) & 15) == 0;
}

struct Sum {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ __forceinline__ double operator()(double a, double b) const { return fmax(a, b); }
};

template <class T, class Op>
__device__ __forceinline__ T warp_reduce(T x, Op op) {
#pragma unroll
  for (int offset = kWarp / 2; offset; offset /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// Every thread gets the result. shared holds one T a warp, and is free again after the call.
template <int kThreads, class T, class Op>
__device__ __forceinline__ T block_reduce(T x, Op op, T* shared) {
  constexpr int kWarps = kThreads / kWarp;
  x = warp_reduce(x, op);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  T y = shared[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) y = op(y, shared[w]);
  __syncthreads();
  return y;
}

// A float16 row is stored with the power of two that brings its largest entry to [2^13, 2^14); the factor that removes
// it is returned through `remove`, and is 1 for rows that are zero or not finite.
__device__ __forceinline__ float half_row_factor(float largest, float& remove) {
  remove = 1.f;
  if (!(largest > 0.f) || isinf(largest)) return 1.f;
  int e = 14 - (ilogbf(largest) + 1);
  e = e < -120 ? -120 : e > 120 ? 120 : e;
  remove = ldexpf(1.f, -e);
  return ldexpf(1.f, e);
}

}  // namespace syncfree
