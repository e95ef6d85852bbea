// From the accumulators of one m64 tile to memory: arithmetic on fragments, then registers -> swizzled staging -> bulk
// tensor store.
//
// A thread holds, for i < BN / 2, the element in row warp * 16 + (lane / 4) + (i & 2 ? 8 : 0), column (i / 4) * 8 +
// (lane % 4) * 2 + (i & 1).
#pragma once

#include "../kernels/softcap.cuh"
#include "split_accumulator.cuh"
#include "store_rows.cuh"

namespace syncfree::sm90 {

constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ __forceinline__ void stmatrix4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// Beside a softcap every number is a logit that counts, -inf too: what lies outside is a NaN that arithmetic, which has
// one NaN of its own, never gives.
constexpr uint32_t kOutside = 0xffc05ee0u;

// The pairs of row r0 and of r1 = r0 + kPairRows in this tile, from the lane of each four that has them.
template <class C>
__device__ __forceinline__ void store_pairs(const GemmArgs& p, float2* pairs, int r0, int col, int live, float2 first,
                                            float2 second) {
  static_assert(kPairRows == 8);  // rows of a fragment
  if ((threadIdx.x & 3) || r0 >= live) return;
  float2* at = pairs + fused_pair(r0, col / C::kBN, p.tiles);
  *at = first;
  if (r0 + kPairRows < live) at[p.tiles * kPairRows] = second;
}

// Maximum of each row over the tile's columns, to the first of its pair.
template <class C>
__device__ __forceinline__ void store_row_max(const GemmArgs& p, float (&acc)[C::kBN / 2], int row, int col, int live,
                                              float scale) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5;
  const int r0 = row + warp * 16 + (lane >> 2);
  float m0 = -INFINITY, m1 = -INFINITY;
#pragma unroll
  for (int i = 0; i < C::kBN / 2; ++i) {
    if (col + (i >> 2) * 8 + (lane & 3) * 2 + (i & 1) >= p.n) continue;
    float& m = (i & 2) ? m1 : m0;
    float z = acc[i];
    if constexpr (C::kBiased) z += p.bias[col + (i >> 2) * 8 + (lane & 3) * 2 + (i & 1)];
    m = fmaxf(m, z * scale);
  }
#pragma unroll
  for (int offset = 1; offset <= 2; offset *= 2) {
    m0 = fmaxf(m0, __shfl_xor_sync(0xffffffffu, m0, offset));
    m1 = fmaxf(m1, __shfl_xor_sync(0xffffffffu, m1, offset));
  }
  if constexpr (C::kLogit == Logit::capped)
    m0 = softcapped(m0 * p.inverse_softcap).tanh * p.softcap, m1 = softcapped(m1 * p.inverse_softcap).tanh * p.softcap;
  store_pairs<C>(p, p.sums, r0, col, live, make_float2(m0, 0.f), make_float2(m1, 0.f));
}

template <class C>
__device__ __forceinline__ void store_tile(const GemmArgs& p, float (&acc)[C::kBN / 2], uint32_t staging, int wg,
                                           int row, int col, int live, float scale, bool last) {
  if constexpr (C::kEpilogue == Epilogue::row_max) {
    store_row_max<C>(p, acc, row, col, live, scale);
    return;
  }
  if constexpr (C::kRows) {
    store_rows<C>(p, acc, staging, wg, row, col, live);
    return;
  }
  const int tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;
  const int r0 = row + warp * 16 + (lane >> 2), r1 = r0 + 8;
  const bool leader = tid == 0;
  float k0 = 0.f, k1 = 0.f, exact0 = 0.f, exact1 = 0.f, rounded0 = 0.f, rounded1 = 0.f;

  if constexpr (C::kRowExp) {
    k0 = r0 < live ? p.exponent[r0] : 0.f;
    k1 = r1 < live ? p.exponent[r1] : 0.f;
    const int t0 = r0 < live ? p.target[r0] - col : -1, t1 = r1 < live ? p.target[r1] - col : -1;
    // Columns past V and rows past the live ones give E = 0; a negative scale must not turn their -inf round.
    const float nothing = C::kLogit == Logit::capped ? __uint_as_float(kOutside) : scale < 0.f ? INFINITY : -INFINITY;
    if (col + C::kBN > p.n || row + 64 > live) {
#pragma unroll
      for (int i = 0; i < C::kBN / 2; ++i)
        if (col + (i >> 2) * 8 + (lane & 3) * 2 + (i & 1) >= p.n || ((i & 2) ? r1 : r0) >= live) acc[i] = nothing;
    }
    const bool hit = (t0 >= 0 && t0 < C::kBN) || (t1 >= 0 && t1 < C::kBN);
    if (__any_sync(0xffffffffu, hit)) {
#pragma unroll
      for (int i = 0; i < C::kBN / 2; ++i) {
        if ((i >> 2) * 8 + (lane & 3) * 2 + (i & 1) == ((i & 2) ? t1 : t0)) {
          float logit = acc[i];
          if constexpr (C::kBiased) logit += p.bias[col + ((i & 2) ? t1 : t0)];
          p.target_logit[(i & 2) ? r1 : r0] = logit;
          acc[i] = nothing;
        }
      }
    }
  } else if constexpr (C::kBound == Bound::m) {
    if (row + 64 > live) {
#pragma unroll
      for (int i = 0; i < C::kBN / 2; ++i)
        if (((i & 2) ? r1 : r0) >= live) acc[i] = 0.f;
    }
  }

  if constexpr (C::kSplit) {
    const SplitAccumulator<C> sum(p, row, col);
    if (p.load) sum.add_to(acc);
    if (!last) return sum.store(acc);
    if (p.starts[r0] >= 0 || p.starts[r1] >= 0) sum.store_low(acc);
  }

  // The target and what lies outside hold -inf in this sense, or NaN; a thread meets its columns in ascending order.
  [[maybe_unused]] const float sense = scale > 0.f ? 1.f : -1.f;
  [[maybe_unused]] float best0 = -INFINITY, best1 = -INFINITY;
  [[maybe_unused]] int at0 = 0, at1 = 0;
  [[maybe_unused]] const float to_cap = C::kLogit == Logit::capped ? scale * p.inverse_softcap : 0.f;

  constexpr int kColumns = C::kF32 ? 32 : 64;
  constexpr int kParts = C::kBN / kColumns;  // written out, or in turns (kLoops)
#pragma unroll 1
  for (int turn = 0; turn < (C::kLoops ? kParts : 1); ++turn)
#pragma unroll
    for (int part = 0; part < (C::kLoops ? 1 : kParts); ++part) {
      const int chunk = turn + part;
      const uint32_t buffer = staging + (wg * C::kBuffers + chunk % C::kBuffers) * C::kBuffer;
      uint32_t packed[C::kF32 ? 1 : 16];  // arithmetic first, so that it overlaps the copy engine's read of the buffer
      if constexpr (!C::kF32) {
#pragma unroll
        for (int q = 0; q < 16; ++q) {
          const float* v = acc + (C::kLoops ? 0 : chunk * 32) + q * 2;
          [[maybe_unused]] float biased[2];
          if constexpr (C::kBiased) {
            const float2 b = reinterpret_cast<const float2*>(p.bias + col)[(lane & 3) + chunk * 32 + (q & ~1) * 2];
            biased[0] = v[0] + b.x, biased[1] = v[1] + b.y;
            v = biased;
          }
          if constexpr (C::kArgmax) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& best = (q & 1) ? best1 : best0;
              int& at = (q & 1) ? at1 : at0;
              if (v[e] * sense > best) best = v[e] * sense, at = chunk * 32 + q * 2 + e;
            }
          }
          if constexpr (C::kRowExp && C::kLogit == Logit::capped) {
            const float k = (q & 1) ? -k1 : -k0;
            float all[2], stored[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const Softcapped s = softcapped(v[e] * to_cap);
              const float power = exp2_ftz(fmaf(s.tanh, p.softcap, k));
              const bool outside = __float_as_uint(acc[q * 2 + e]) == kOutside;
              all[e] = outside ? 0.f : power, stored[e] = outside ? 0.f : power * s.slope;
            }
            packed[q] = pack_bf16(stored[0], stored[1]);
            ((q & 1) ? exact1 : exact0) += all[0] + all[1];
            ((q & 1) ? rounded1 : rounded0) +=
                (stored[0] - __uint_as_float(packed[q] << 16)) + (stored[1] - __uint_as_float(packed[q] & 0xffff0000u));
          } else if constexpr (C::kRowExp) {
            const float k = (q & 1) ? -k1 : -k0;
            float x = fmaf(v[0], scale, k), y = fmaf(v[1], scale, k);
            // A bias may be huge: then the row's exponent is as exact as the logit that it comes from, rounded alike.
            if constexpr (C::kBiased) x = __fmul_rn(v[0], scale) + k, y = __fmul_rn(v[1], scale) + k;
            x = exp2_ftz(x), y = exp2_ftz(y);
            packed[q] = pack_bf16(x, y);
            ((q & 1) ? exact1 : exact0) += x + y;
            ((q & 1) ? rounded1 : rounded0) +=
                __uint_as_float(packed[q] << 16) + __uint_as_float(packed[q] & 0xffff0000u);
          } else {
            packed[q] = pack_bf16(v[0], v[1]);
          }
        }
      }
      if constexpr (C::kStores) {
        if (leader) tma_store_wait_read<C::kBuffers - 1>();
        named_sync(1 + wg, 128);
        if constexpr (C::kF32) {
          const uint32_t base = buffer + (warp * 16 + (lane >> 2)) * 128 + (lane & 1) * 8;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float* v = acc + chunk * 16 + j * 4;
            const uint32_t at = base + (((j * 2 + ((lane & 3) >> 1)) ^ (lane >> 2)) << 4);
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(v[0]), "f"(v[1]) : "memory");
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + 8 * 128), "f"(v[2]), "f"(v[3]) : "memory");
          }
        } else {
          const int staged = warp * 16 + (lane & 15);
          const uint32_t base = buffer + staged * 128;
#pragma unroll
          for (int j = 0; j < 4; ++j)
            stmatrix4(base + (((j * 2 + (lane >> 4)) ^ (staged & 7)) << 4), packed[j * 4], packed[j * 4 + 1],
                      packed[j * 4 + 2], packed[j * 4 + 3]);
        }
        fence_async_proxy();
        named_sync(1 + wg, 128);
        if (leader) {
          tma_store<C::kAdd>(&p.d, buffer, col + chunk * kColumns, row);
          tma_store_commit();
        }
      }
      if constexpr (C::kLoops) {
#pragma unroll
        for (int i = 0; i < C::kBN / 2 - 32; ++i) acc[i] = acc[i + 32];
      }
    }

  if constexpr (C::kArgmax) {
    at0 = col + (at0 >> 2) * 8 + (lane & 3) * 2 + (at0 & 1);
    at1 = col + (at1 >> 2) * 8 + (lane & 3) * 2 + (at1 & 1);
#pragma unroll
    for (int offset = 1; offset <= 2; offset *= 2) {
      const float b0 = __shfl_xor_sync(0xffffffffu, best0, offset), b1 = __shfl_xor_sync(0xffffffffu, best1, offset);
      const int a0 = __shfl_xor_sync(0xffffffffu, at0, offset), a1 = __shfl_xor_sync(0xffffffffu, at1, offset);
      if (b0 > best0 || (b0 == best0 && a0 < at0)) best0 = b0, at0 = a0;
      if (b1 > best1 || (b1 == best1 && a1 < at1)) best1 = b1, at1 = a1;
    }
    store_pairs<C>(p, p.best, r0, col, live, make_float2(best0, __int_as_float(at0)),
                   make_float2(best1, __int_as_float(at1)));
  }
  if constexpr (C::kRowExp) {
#pragma unroll
    for (int offset = 1; offset <= 2; offset *= 2) {
      exact0 += __shfl_xor_sync(0xffffffffu, exact0, offset), exact1 += __shfl_xor_sync(0xffffffffu, exact1, offset);
      rounded0 += __shfl_xor_sync(0xffffffffu, rounded0, offset),
          rounded1 += __shfl_xor_sync(0xffffffffu, rounded1, offset);
    }
    store_pairs<C>(p, p.sums, r0, col, live, make_float2(exact0, rounded0), make_float2(exact1, rounded1));
  }
}

}  // namespace syncfree::sm90
