// The loss of one row and the coefficients of its gradient, from statistics of its logits. Compiled for host and
// device, in float or double. docs/semantics.md derives it.
//
// With l the final logits, t the target: every quantity that would be a difference of nearly equal numbers is formed
// from the *other* classes. S = sum_{j != t} e^(l_j - m) gives lse - l_t = log1p(S / e^(l_t - m)) and 1 - p_t = S / (S
// + e^(l_t - m)).
#pragma once

#include <cmath>

#include "params.h"

#if defined(__CUDACC__)
#define SF_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SF_HOST_DEVICE inline
#endif

namespace syncfree {

// What one pass over a row leaves; the order is that of row_stats.
template <class T>
struct RowStats {
  T max_other;     // max_{j != t} l_j, -inf without other classes
  T sum_other;     // sum_{j != t} e^(l_j - max_other), 0 without other classes
  T target_logit;  // l_t; NaN for a target that is no class
  T smooth;        // sum_j c_j (l_j - base), base = smooth_base(l_t); read only with label smoothing
};

// Logits are summed relative to the target's, so that a common offset costs no digits.
template <class T>
SF_HOST_DEVICE T smooth_base(T target_logit) {
  return std::isfinite(target_logit) ? target_logit : T(0);
}

// Everything about the options that is the same for each row.
template <class T>
struct RowConstants {
  T smoothing, logit_scale, z_weight, softcap;
  T classes;       // V
  T weight_total;  // C
  T z_over_ce;     // reciprocal divisor of the z part over that of the cross-entropy part
  T grad_factor;   // logit_scale x power of two of float16, and the divisor where g is final
  bool token_scaling;
};

// float16 g carries 2^half_exponent: |g| <= max|multiplier| max|c| |logit_scale| (2 + 2 z_weight lse) is brought to
// about 2^10 for lse up to 128, which leaves a factor of 2^5 for larger ones and 24 binary digits below for small
// probabilities.
SF_HOST_DEVICE int half_exponent(const double* counts, double logit_scale, double z_weight) {
  const double bound = std::fabs(counts[kMaxMultiplier] * std::fmax(counts[kMaxWeight], 1.0) * logit_scale) *
                       (2.0 + 256.0 * std::fabs(z_weight));
  if (!(bound > 0) || !std::isfinite(bound)) return 0;
  int e = 0;
  std::frexp(bound, &e);  // bound < 2^e
  e = 10 - e;
  return e < -100 ? -100 : e > 100 ? 100 : e;
}

// The slots of counts from N, D, C and the maxima. num_items <= 0 counts as 1.
SF_HOST_DEVICE void write_counts(double* counts, double n, double d, double c, double max_weight, double max_multiplier,
                                 Reduction reduction, bool weighted, const double* num_items) {
  double ce = 1.0, z = 1.0;
  if (reduction == Reduction::mean) {
    if (num_items) {
      ce = z = *num_items <= 0.0 ? 1.0 : 1.0 / *num_items;
    } else {
      const double divisor = weighted ? d : n;
      ce = divisor == 0.0 ? double(NAN) : 1.0 / divisor;
      z = 1.0 / n;
    }
  }
  if (n == 0.0) ce = z = 0.0;
  counts[kCountRows] = n;
  counts[kCountWeight] = d;
  counts[kCountClasses] = c;
  counts[kInverseCe] = ce;
  counts[kInverseZ] = z;
  counts[kMaxWeight] = max_weight;
  counts[kMaxMultiplier] = max_multiplier;
  counts[kCountSlots - 1] = 0.0;
}

SF_HOST_DEVICE double option_logit_scale(const LossOptions& o) {
  return o.logit_scale_ptr ? *o.logit_scale_ptr : o.logit_scale;
}
SF_HOST_DEVICE double option_z_weight(const LossOptions& o) {
  return o.z_loss_weight_ptr ? *o.z_loss_weight_ptr : o.z_loss_weight;
}

template <class T>
SF_HOST_DEVICE RowConstants<T> row_constants(const RowParams& p) {
  const double* counts = p.chunk.counts;
  const double logit_scale = option_logit_scale(p.options), z_weight = option_z_weight(p.options);
  double factor = logit_scale;
  if (p.divide) {
    factor *= counts[kInverseCe];
    if (p.upstream_scalar) factor *= static_cast<const T*>(p.upstream_scalar)[0];
  } else if (p.grad_dtype == DType::f16) {
    factor = std::ldexp(factor, half_exponent(counts, logit_scale, z_weight));
  }
  const double ratio = counts[kInverseZ] / counts[kInverseCe];
  RowConstants<T> c;
  c.smoothing = T(p.options.label_smoothing);
  c.logit_scale = T(logit_scale);
  c.z_weight = T(z_weight);
  c.softcap = T(p.options.softcap);
  c.classes = T(p.total_classes);
  c.weight_total = T(counts[kCountClasses]);
  c.z_over_ce = std::isfinite(ratio) ? T(ratio) : T(1);
  c.grad_factor = T(factor);
  c.token_scaling = p.options.token_scaling;
  return c;
}

// g_j = slope * e^(l_j - shift) - offset * c_j for j != t (c_j = 1 without class weights), g_t = target; with a softcap
// times softcap_slope(l_j).
template <class T>
struct RowResult {
  T ce, z, logsumexp;
  T shift, slope, offset, target;
};

// multiplier: token weight; upstream: gradient of this row's loss.
template <class T>
SF_HOST_DEVICE RowResult<T> row_result(const RowStats<T>& s, const RowConstants<T>& c, T target_weight, T multiplier,
                                       T upstream) {
  RowResult<T> r;
  const T m = s.max_other > s.target_logit ? s.max_other : s.target_logit;
  const T others = s.sum_other > T(0) ? s.sum_other * std::exp(s.max_other - m) : s.sum_other;
  const T own = std::exp(s.target_logit - m);
  const T total = others + own, inverse = T(1) / total;
  const T p_t = own * inverse, q = others * inverse;
  const T nll = s.target_logit >= s.max_other ? std::log1p(others) : (m - s.target_logit) + std::log(total);
  r.logsumexp = m + std::log(total);

  const T keep = (T(1) - c.smoothing) * target_weight, spread = c.smoothing / c.classes;
  T ce = keep == T(0) ? T(0) : keep * nll;
  if (c.smoothing > T(0)) {
    const T base = smooth_base(s.target_logit), above = base == s.target_logit ? nll : r.logsumexp - base;
    ce += spread * (c.weight_total * above - s.smooth);
  }
  const T z = c.z_weight == T(0) ? T(0) : c.z_weight * r.logsumexp * r.logsumexp;
  const T row = c.token_scaling ? multiplier * p_t : multiplier;
  r.ce = ce * row;
  r.z = z * row;

  const T factor = row * upstream * c.grad_factor;
  const T z_slope = c.z_weight == T(0) ? T(0) : T(2) * c.z_weight * c.z_over_ce * r.logsumexp;
  r.shift = m;
  r.slope = factor * (keep + spread * c.weight_total + z_slope) * inverse;
  r.offset = factor * spread;
  r.target = factor * (spread * (c.weight_total * p_t - target_weight) - keep * q + z_slope * p_t);
  return r;
}

// d(softcap tanh(s / softcap)) / ds = 1 - tanh^2 = 4 q / (1 + q)^2 with q = e^(-2 |s| / softcap): nothing cancels.
template <class T>
SF_HOST_DEVICE T softcap_slope(T s, T softcap) {
  const T q = std::exp(T(-2) * std::fabs(s) / softcap), d = T(1) + q;
  return T(4) * q / (d * d);
}

}  // namespace syncfree
