// dX from the accumulators to the rows that the chunk was gathered from: alpha (v acc + g w_t), with label smoothing
// less alpha offset times the sum of W's rows, in float32 up to the one rounding. A slice's share of it stays in the
// chunk's order and in float32. Each warp turns its own 16 rows through its part of the staging buffers, so that a lane
// gets eight neighbouring columns of a row; no other warp waits.
#pragma once

#include "../kernels/device.cuh"
#include "gemm_config.cuh"

namespace syncfree::sm90 {

template <class C>
__device__ __forceinline__ void store_rows(const GemmArgs& p, const float (&acc)[C::kBN / 2], uint32_t staging, int wg,
                                           int row, int col, int live) {
  static_assert(C::kBuffers == 2);  // one is written while the other is read
  constexpr int kColumns = 32;      // of float32 in a staged row of 128 bytes
  const int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5, group = lane >> 2, part = lane & 3;
  const float alpha = gradient_factor(p.chunk.counts, p.chunk.upstream);
  const int64_t first = ChunkRows(p.chunk).first;
  float v[2], g[2];
  [[maybe_unused]] float offset[2];
  const __nv_bfloat16* w[2];
  int64_t home[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int k = row + warp * 16 + group + 8 * h;
    const bool is_live = k < live;
    const int t = is_live ? p.target[k] : -1;
    v[h] = is_live ? p.v[k] * alpha : 0.f;
    g[h] = t >= 0 ? p.g_target[first + k] * alpha : 0.f;
    if constexpr (C::kSmoothed) offset[h] = is_live ? p.offset[first + k] * alpha : 0.f;
    w[h] = t >= 0 ? p.weight + t * p.weight_pitch : nullptr;
    home[h] = is_live ? int64_t(C::kShare ? k : p.chunk.row_index[first + k]) * p.n : -1;
  }
#pragma unroll
  for (int chunk = 0; chunk < C::kBN / kColumns; ++chunk) {
    const uint32_t own = staging + (wg * C::kBuffers + chunk % 2) * C::kBuffer + warp * 16 * 128;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* a = acc + chunk * 16 + j * 4;
      const uint32_t at = own + group * 128 + (((j * 2 + (part >> 1)) ^ group) << 4) + (part & 1) * 8;
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(a[0]), "f"(a[1]) : "memory");
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + 8 * 128), "f"(a[2]), "f"(a[3]) : "memory");
    }
    __syncwarp();
    const int column = col + chunk * kColumns + part * 8;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float y[8];
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const uint32_t at = own + (group + 8 * h) * 128 + (((part * 2 + q) ^ group) << 4);
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(y[q * 4]), "=f"(y[q * 4 + 1]), "=f"(y[q * 4 + 2]), "=f"(y[q * 4 + 3])
                     : "r"(at)
                     : "memory");
      }
      if (home[h] < 0 || column >= p.n) continue;
#pragma unroll
      for (int e = 0; e < 8; ++e) y[e] *= v[h];
      if (w[h]) {
        const Pack<__nv_bfloat16> target = *reinterpret_cast<const Pack<__nv_bfloat16>*>(w[h] + column);
#pragma unroll
        for (int e = 0; e < 8; ++e) y[e] = fmaf(g[h], to_float(target.v[e]), y[e]);
      }
      if constexpr (C::kSmoothed) subtract8(offset[h], p.smooth, column / 8, y);
      const int64_t at = home[h] + column;
      if (!C::kShare && p.out_dtype == DType::bf16)
        store8(static_cast<__nv_bfloat16*>(p.out) + at, y);
      else if (C::kShare || p.out_dtype == DType::f32)
        store8(static_cast<float*>(p.out) + at, y);
      else
        store8(static_cast<__half*>(p.out) + at, y);
    }
  }
}

}  // namespace syncfree::sm90
