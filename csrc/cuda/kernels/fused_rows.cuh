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

constexpr int kRowsPerBlock = 32, kSlices = 8;

// The larger logit, the lower class of equals.
__device__ __forceinline__ void take_larger(float2& best, float2 other) {
  const bool larger = other.x > best.x || (other.x == best.x && __float_as_int(other.y) < __float_as_int(best.y));
  if (larger) best = other;
}

struct TileSums {
  double exact, rounded;
  float2 best;
};

// 32 rows a block, 8 slices of tiles each; slices are added in order. The threads of slice 0 get the sums of row k.
__device__ __forceinline__ TileSums sum_tiles(const FusedRows& rows, int64_t tiles, int64_t size, int64_t k,
                                              bool is_live) {
  __shared__ double exact_sums[kSlices][kRowsPerBlock], rounded_sums[kSlices][kRowsPerBlock];
  __shared__ float2 best_of[kSlices][kRowsPerBlock];
  const int lane = threadIdx.x % kRowsPerBlock, slice = threadIdx.x / kRowsPerBlock;
  TileSums sum{0, 0, make_float2(-INFINITY, __int_as_float(INT32_MAX))};
  if (is_live && rows.best) {
    const float2* found = static_cast<const float2*>(rows.best);
    for (int64_t t = slice; t < tiles; t += kSlices) take_larger(sum.best, found[t * size + k]);
  }
  if (is_live) {
    const float2* sums = static_cast<const float2*>(rows.sums);
    for (int64_t t = slice; t < tiles; t += kSlices) {
      const float2 s = sums[t * size + k];
      sum.exact += double(s.x), sum.rounded += double(s.y);
    }
  }
  exact_sums[slice][lane] = sum.exact;
  rounded_sums[slice][lane] = sum.rounded;
  best_of[slice][lane] = sum.best;
  __syncthreads();
  if (slice == 0) {
    for (int s = 1; s < kSlices; ++s) {
      sum.exact += exact_sums[s][lane], sum.rounded += rounded_sums[s][lane];
      take_larger(sum.best, best_of[s][lane]);
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
