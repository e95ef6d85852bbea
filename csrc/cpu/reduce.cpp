// From the parts of each row to the results, and the factor that turns products into gradients.
#include <cmath>

#include "../common/formulas.h"
#include "backend.h"
#include "numbers.h"

namespace syncfree {
namespace {

template <class T>
double sum_in_order(const T* values, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += double(values[i]);
  return sum;
}

template <class T>
void reduce_rows(const ReduceParams& p) {
  const T* ce = static_cast<const T*>(p.ce);
  const T* z = static_cast<const T*>(p.z);
  T* loss = static_cast<T*>(p.loss);
  T* z_loss = static_cast<T*>(p.z_loss);
  if (p.reduction == Reduction::none) {
    for (int64_t i = 0; i < p.rows; ++i) {
      loss[i] = ce[i] + z[i];
      z_loss[i] = z[i];
    }
    return;
  }
  const double ce_part = sum_in_order(ce, p.rows) * p.counts[kInverseCe],
               z_part = sum_in_order(z, p.rows) * p.counts[kInverseZ];
  *loss = T(ce_part + z_part);
  *z_loss = T(z_part);
  if (p.accuracy) *p.accuracy = float(sum_in_order(p.correct, p.rows) / std::fmax(p.counts[kCountRows], 1.0));
}

template <class T>
void write_alpha(const AlphaParams& p) {
  double factor = p.counts[kInverseCe];
  if (p.upstream_scalar) factor *= double(*static_cast<const T*>(p.upstream_scalar));
  if (p.half) {
    factor = std::ldexp(factor, -half_exponent(p.counts, option_logit_scale(p.options), option_z_weight(p.options)));
  }
  T* alpha = static_cast<T*>(p.alpha);
  alpha[0] = T(factor), alpha[1] = T(0), alpha[2] = T(1);
}

}  // namespace

void reduce_cpu(const ReduceParams& p) {
  with_acc(p.acc, [&](auto tag) { reduce_rows<typename decltype(tag)::type>(p); });
}

void alpha_cpu(const AlphaParams& p) {
  with_acc(p.acc, [&](auto tag) { write_alpha<typename decltype(tag)::type>(p); });
}

}  // namespace syncfree
