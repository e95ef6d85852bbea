// What the losses of a chunk are made of, for a block of its rows: E's sums over the tiles, then a row's loss and the
// factors of its gradient.
#pragma once

#include "../../common/formulas.h"
#include "../hopper/dependent_launch.cuh"
#include "device.cuh"
#include "fused_chunk.cuh"
#include "softcap.cuh"

namespace syncfree {

constexpr float kLog2e = 1.4426950408889634f;
// The target's E is 2^-40. bfloat16 could hold classes up to 167 binary orders above it, but what follows multiplies in
// float32: past a sum of 2^60 (a loss of about 69 nats) 1 / sum times x, or E times W, could leave its range, so such a
// row is redone relative to its maximum.
constexpr float kTargetExponent = 40.f;
constexpr float kLargestSum = 1.152921504606847e18f;  // 2^60
// With token scaling the probability of the target is a factor of v once more, which would leave it no range.
constexpr float kLargestScaledSum = 1048576.f;  // 2^20

// What a chunk's losses take is how long a row waits for memory, so a block has few rows and many loads under way.
constexpr int kRowThreads = 256, kRowWarps = kRowThreads / kWarp, kRowsPerBlock = kPairRows,
              kSlices = kRowThreads / kRowsPerBlock;
constexpr int kRowBlocks = 4;  // resident at least: registers for the loads, and blocks enough for most chunks
static_assert(kRowWarps == kRowsPerBlock && kWarp % kRowsPerBlock == 0 && kRowGroup % kRowsPerBlock == 0);

// The larger logit, the lower class of equals.
__device__ __forceinline__ void take_larger(float2& best, float2 other) {
  const bool larger = other.x > best.x || (other.x == best.x && __float_as_int(other.y) < __float_as_int(best.y));
  if (larger) best = other;
}

struct TileSums {
  double exact, rounded;
  float2 best;
};

// use(pair) for the pairs of row k in every kSlices-th tile, in order, and use(nothing) past the last, so that many
// loads are under way at once.
template <class Use>
__device__ __forceinline__ void for_each_tile(const void* pairs, int64_t tiles, int64_t k, float2 nothing, Use use) {
  constexpr int kBatch = 16;
  const float2* of_row = static_cast<const float2*>(pairs) + fused_pair(k, 0, tiles);
  for (int64_t t = threadIdx.x / kRowsPerBlock; t < tiles; t += kBatch * kSlices) {
    float2 pair[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      pair[b] = t + b * kSlices < tiles ? of_row[(t + b * kSlices) * kPairRows] : nothing;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) use(pair[b]);
  }
}

// Row k = that of threadIdx.x % kRowsPerBlock; the tiles in slices, which are added in a fixed order. The first
// kRowsPerBlock threads get the sums.
__device__ __forceinline__ TileSums sum_tiles(const FusedRows& rows, int64_t tiles, int64_t k, bool is_live) {
  __shared__ TileSums of_warp[kRowWarps][kRowsPerBlock];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const float2 none = make_float2(-INFINITY, __int_as_float(INT32_MAX));
  TileSums sum{0, 0, none};
  if (is_live && rows.best) for_each_tile(rows.best, tiles, k, none, [&](float2 b) { take_larger(sum.best, b); });
  if (is_live) {
    for_each_tile(rows.sums, tiles, k, make_float2(0.f, 0.f),
                  [&](float2 s) { sum.exact += double(s.x), sum.rounded += double(s.y); });
  }
#pragma unroll
  for (int offset = kRowsPerBlock; offset < kWarp; offset *= 2) {
    sum.exact += __shfl_xor_sync(0xffffffffu, sum.exact, offset);
    sum.rounded += __shfl_xor_sync(0xffffffffu, sum.rounded, offset);
    const float logit = __shfl_xor_sync(0xffffffffu, sum.best.x, offset),
                its_class = __shfl_xor_sync(0xffffffffu, sum.best.y, offset);
    take_larger(sum.best, make_float2(logit, its_class));
  }
  if (lane < kRowsPerBlock) of_warp[warp][lane] = sum;
  __syncthreads();
  if (threadIdx.x < kRowsPerBlock) {
    for (int w = 1; w < kRowWarps; ++w) {
      const TileSums& other = of_warp[w][lane];
      sum.exact += other.exact, sum.rounded += other.rounded;
      take_larger(sum.best, other.best);
    }
  }
  return sum;
}

// A row whose E has left its range is marked for repair.
__device__ __forceinline__ void mark_if_bad(const FusedRows& rows, int64_t k, double exact, const LossOptions& o) {
  if (!(exact > double(o.token_scaling ? kLargestScaledSum : kLargestSum))) return;
  rows.bad[k] = 1;
  rows.only[k / kRowGroup] = 1;
  *rows.any = 1;
}

struct RowGradient {
  RowResult<float> row;
  float v, g;  // of E relative to the exponent, and of the target
};

// i: the row. exact: the sum of E of the other classes; residue: what rounding took from what is stored of it. z: the
// target's logit before logit_scale and softcap. smooth: label smoothing's sum of all logits, where there is one.
__device__ __forceinline__ RowGradient row_gradient(const RowParams& p, const RowConstants<float>& constants, int64_t i,
                                                    float exponent, double exact, float residue, float z,
                                                    float target_weight, const double* smooth_logits) {
  const float scale = constants.logit_scale * kLog2e, cap = softcap_log2(p.options);
  // Relative to the target where that keeps the digits of small losses; else relative to the row's exponent, which leaves
  // the factors of a row their range.
  const float capped = cap > 0.f ? softcapped(z * scale / cap).tanh : 0.f;
  const float above = cap > 0.f ? fmaf(-capped, cap, exponent)
                      : p.bias  ? exponent - __fmul_rn(z, scale)  // as E has it
                                : fmaf(-z, scale, exponent),
              logit = cap > 0.f ? capped * constants.softcap : z * constants.logit_scale;
  // Without other classes nothing is far below or above: where logits are huge, 2^above may be infinite.
  const double relative = exact == 0 ? 0 : exact * exp2(double(above));
  const bool by_target = !(relative > 1e9);
  const double smooth =
      smooth_logits ? *smooth_logits * constants.logit_scale - p.chunk.counts[kCountClasses] * smooth_base(logit) : 0.0;
  const RowStats<float> stats{by_target ? logit : exponent / kLog2e, float(by_target ? relative : exact), logit,
                              float(smooth)};
  const float multiplier = p.token_weight ? static_cast<const float*>(p.token_weight)[i + p.shift] : 1.f;
  const float upstream = p.upstream ? static_cast<const float*>(p.upstream)[i * p.upstream_stride] : 1.f;
  RowGradient out;
  out.row = row_result(stats, constants, target_weight, multiplier, upstream);
  out.v = by_target && exact != 0 ? out.row.slope * exp2f(above) : out.row.slope;
  if (cap > 0.f) out.row.target *= softcap_slope(z * constants.logit_scale, constants.softcap);
  // The target takes what rounding E left over, so that the row of gradients sums to what it should.
  out.g = out.row.target + out.v * residue;
  // Smoothing's share is taken off all classes at once, the target included, which row.target has without it.
  if (smooth_logits) out.g = fmaf(out.row.offset, target_weight, out.g);
  return out;
}

// Row k of what the dW product reads, by one warp: x times factor, in place.
__device__ __forceinline__ void scale_row(void* gathered, int64_t k, int64_t hidden, float factor) {
  Pack<__nv_bfloat16>* x = reinterpret_cast<Pack<__nv_bfloat16>*>(static_cast<__nv_bfloat16*>(gathered) + k * hidden);
  constexpr int kBatch = 4;  // loads in flight
  for (int64_t i = threadIdx.x % kWarp; i < hidden / 8; i += kBatch * kWarp) {
    Pack<__nv_bfloat16> a[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (i + b * kWarp < hidden / 8) a[b] = x[i + b * kWarp];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (i + b * kWarp >= hidden / 8) break;
#pragma unroll
      for (int e = 0; e < 8; ++e) a[b].v[e] = __float2bfloat16_rn(to_float(a[b].v[e]) * factor);
      x[i + b * kWarp] = a[b];
    }
  }
}

}  // namespace syncfree
