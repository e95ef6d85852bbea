// D kept in 24 bits between launches: the upper 16 of each fp32 in D's own memory, 8 more in `low`, at V * H bytes in
// all.
//
// Rounded to nearest, ties away from zero, once a launch: at most 2^-17 of the sum, in either direction. Infinity stays
// infinity and NaN stays NaN, since sums in float32 have one NaN, 0x7fffffff. Each warp writes its fragments in
// whole runs of 16 bytes to the cells of its own 16 rows, so the upper halves lie scrambled there until the last launch
// loads them all and stores D row-major. m % 64 == 0, n % BN == 0.
#pragma once

#include "gemm_config.cuh"

namespace syncfree::sm90 {

template <class C>
struct SplitAccumulator {
  static_assert(C::kBN == 128);  // 32 runs of 16 bytes are then two rows of the tile
  static constexpr int kRuns = C::kBN / 8, kRows = 32 / kRuns;

  uint8_t *low, *high;
  int64_t step;

  __device__ __forceinline__ SplitAccumulator(const GemmArgs& p, int row, int col) {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5;
    low = p.low + (static_cast<size_t>(row >> 6) * (p.n / C::kBN) + col / C::kBN) * (64 * C::kBN) + warp * 16 * C::kBN +
          lane * 16;
    high = p.high + (row + warp * 16 + lane / kRuns) * p.high_pitch + col * 2 + (lane % kRuns) * 16;
    step = kRows * p.high_pitch;
  }

  // The upper 24 bits are the result. Half a unit more than 0x7fffff7f would carry NaN into the sign, hence the minimum,
  // which changes nothing else: as integers, negative numbers are below it.
  static __device__ __forceinline__ uint32_t round24(float x) {
    return static_cast<uint32_t>(min(__float_as_int(x), 0x7fffff7f) + 0x80);
  }

  __device__ __forceinline__ void add_to(float (&acc)[C::kBN / 2]) const {
    const uint8_t* at = high;
#pragma unroll
    for (int i = 0; i < C::kBN / 32; ++i) {
      const uint4 l = *reinterpret_cast<const uint4*>(low + i * 512);
      const uint4 h0 = *reinterpret_cast<const uint4*>(at), h1 = *reinterpret_cast<const uint4*>(at + step);
      at += 2 * step;
      const uint32_t h[8] = {h0.x, h0.y, h0.z, h0.w, h1.x, h1.y, h1.z, h1.w}, lo[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
      for (int w = 0; w < 8; ++w) {
        const uint32_t u0 = __byte_perm(h[w], lo[w >> 1], (w & 1) ? 0x1060 : 0x1040) & 0xffffff00u;
        const uint32_t u1 = __byte_perm(h[w], lo[w >> 1], (w & 1) ? 0x3270 : 0x3250) & 0xffffff00u;
        acc[i * 16 + w * 2] += __uint_as_float(u0), acc[i * 16 + w * 2 + 1] += __uint_as_float(u1);
      }
    }
  }

  __device__ __forceinline__ void store(const float (&acc)[C::kBN / 2]) const {
    uint8_t* at = high;
#pragma unroll
    for (int i = 0; i < C::kBN / 32; ++i) {
      asm volatile("" : "+l"(at)::"memory");  // one step at a time: more would spill
      uint32_t h[8], lo[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t u[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) u[q] = round24(acc[i * 16 + w * 4 + q]);
        h[w * 2] = __byte_perm(u[0], u[1], 0x7632), h[w * 2 + 1] = __byte_perm(u[2], u[3], 0x7632);
        lo[w] = __byte_perm(__byte_perm(u[0], u[1], 0x0051), __byte_perm(u[2], u[3], 0x0051), 0x5410);
      }
      *reinterpret_cast<uint4*>(low + i * 512) = make_uint4(lo[0], lo[1], lo[2], lo[3]);
      *reinterpret_cast<uint4*>(at) = make_uint4(h[0], h[1], h[2], h[3]);
      *reinterpret_cast<uint4*>(at + step) = make_uint4(h[4], h[5], h[6], h[7]);
      at += 2 * step;
    }
  }

  // Beside D rounded to nearest: with them read_split gives the sum again. Of a tie that goes down the byte is lowered
  // by one, so that "at least 0x80" says that D was rounded up.
  __device__ __forceinline__ void store_low(const float (&acc)[C::kBN / 2]) const {
#pragma unroll
    for (int i = 0; i < C::kBN / 32; ++i) {
      uint32_t lo[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        lo[w] = 0;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const uint32_t u = __float_as_uint(acc[i * 16 + w * 4 + q]);
          const uint32_t byte = (u & 0x1ffffu) == 0x8000u ? 0x7fu : (u >> 8) & 0xffu;
          lo[w] |= byte << (8 * q);
        }
      }
      *reinterpret_cast<uint4*>(low + i * 512) = make_uint4(lo[0], lo[1], lo[2], lo[3]);
    }
  }
};

}  // namespace syncfree::sm90
