// Statistics, loss and gradient of the logits, a row at a time on one thread: formulas.h says what, this file how.
//
// Reads a row three times (maximum, sum of exponentials, gradient), which after the first time comes from the
// second-level cache. Rows with a bias, a softcap, label smoothing or class weights are first brought to their final
// logits in a buffer of the thread; with a softcap its slope is kept beside them, as both come from one exponential.
#include <memory>

#include "../common/formulas.h"
#include "backend.h"
#include "simd.h"

namespace syncfree {
namespace {

constexpr int kUnroll = 4;              // independent chains, enough to hide the latency of an addition
constexpr int64_t kSumBlock = 1 << 12;  // classes that one float sum runs over before it is added up in double

template <class Ops, class In>
SF_INLINE typename Ops::T max_logit(const In* z, int64_t n, typename Ops::T scale, typename Ops::T start) {
  using V = typename Ops::V;
  constexpr int W = Ops::kWidth;
  V m[kUnroll];
  for (int u = 0; u < kUnroll; ++u) m[u] = Ops::set(start);
  int64_t j = 0;
  for (; j + kUnroll * W <= n; j += kUnroll * W) {
    for (int u = 0; u < kUnroll; ++u) m[u] = Ops::max(Ops::load(z + j + u * W) * scale, m[u]);
  }
  for (; j + W <= n; j += W) m[0] = Ops::max(Ops::load(z + j) * scale, m[0]);
  if (j < n) {
    const V tail = load_tail<Ops>(z + j, n - j, typename Ops::T(0)) * scale;
    m[0] = Ops::max(Ops::select(Ops::first_lanes(n - j), tail, Ops::set(start)), m[0]);
  }
  for (int u = 1; u < kUnroll; ++u) m[0] = Ops::max(m[u], m[0]);
  return Ops::max_lane(m[0]);
}

template <class Ops, class In>
SF_INLINE double sum_exp(const In* z, int64_t n, typename Ops::T scale, typename Ops::T shift) {
  using V = typename Ops::V;
  constexpr int W = Ops::kWidth;
  double total = 0;
  for (int64_t first = 0; first < n; first += kSumBlock) {
    const int64_t end = std::min(n, first + kSumBlock);
    V s[kUnroll] = {};
    int64_t j = first;
    for (; j + kUnroll * W <= end; j += kUnroll * W) {
      for (int u = 0; u < kUnroll; ++u) s[u] += Ops::exp(Ops::load(z + j + u * W) * scale - shift);
    }
    for (; j + W <= end; j += W) s[0] += Ops::exp(Ops::load(z + j) * scale - shift);
    if (j < end) {
      const V e = Ops::exp(load_tail<Ops>(z + j, end - j, typename Ops::T(0)) * scale - shift);
      s[0] += Ops::select(Ops::first_lanes(end - j), e, Ops::set(0));
    }
    for (int u = 1; u < kUnroll; ++u) s[0] += s[u];
    total += Ops::sum(s[0]);
  }
  return total;
}

// sum_j c_j (l_j - base), c null: 1.
template <class Ops>
SF_INLINE double sum_above(const typename Ops::T* l, const typename Ops::T* c, int64_t n, typename Ops::T base) {
  using T = typename Ops::T;
  using V = typename Ops::V;
  constexpr int W = Ops::kWidth;
  double total = 0;
  for (int64_t first = 0; first < n; first += kSumBlock) {
    const int64_t end = std::min(n, first + kSumBlock);
    V s[kUnroll] = {};
    int64_t j = first;
    for (; j + kUnroll * W <= end; j += kUnroll * W) {
      for (int u = 0; u < kUnroll; ++u) {
        const V d = Ops::load(l + j + u * W) - base;
        s[u] += c ? Ops::load(c + j + u * W) * d : d;
      }
    }
    for (int u = 1; u < kUnroll; ++u) s[0] += s[u];
    total += Ops::sum(s[0]);
    for (; j < end; ++j) total += double((c ? c[j] : T(1)) * (l[j] - base));
  }
  return total;
}

// One vector of final logits: l = cap tanh(s / cap) or s, with s = scale (z + b); slope = dl/ds where there is a
// softcap.
template <class Ops>
SF_INLINE void final_logit(typename Ops::V z, typename Ops::T scale, typename Ops::T cap, typename Ops::V& l,
                           typename Ops::V& slope) {
  const typename Ops::V s = z * scale;
  if (cap == typename Ops::T(0)) {
    l = s;
  } else {
    Ops::tanh(s / cap, l, slope);
    l = l * cap;
  }
}

template <class Ops, class In>
SF_INLINE void final_logits(const In* z, const typename Ops::T* bias, typename Ops::T scale, typename Ops::T cap,
                            int64_t n, typename Ops::T* l, typename Ops::T* slope) {
  using T = typename Ops::T;
  using V = typename Ops::V;
  constexpr int W = Ops::kWidth;
  V value{}, derivative{};
  int64_t j = 0;
  for (; j + W <= n; j += W) {
    const V v = Ops::load(z + j);
    final_logit<Ops>(bias ? v + Ops::load(bias + j) : v, scale, cap, value, derivative);
    Ops::store(l + j, value);
    if (cap != T(0)) Ops::store(slope + j, derivative);
  }
  if (j < n) {
    const V v = load_tail<Ops>(z + j, n - j, T(0));
    final_logit<Ops>(bias ? v + load_tail<Ops>(bias + j, n - j, T(0)) : v, scale, cap, value, derivative);
    store_tail<Ops>(l + j, value, n - j);
    if (cap != T(0)) store_tail<Ops>(slope + j, derivative, n - j);
  }
}

// The gradient of classes that are not the target, and what rounding took from it, summed. In place (out over z, elements
// of out not larger) each vector is read before anything is written over it or over what comes before it.
template <class Ops, class In, class Out>
SF_INLINE typename Ops::T gradient(const In* z, int64_t n, typename Ops::T scale, const RowResult<typename Ops::T>& r,
                                   const typename Ops::T* c, const typename Ops::T* cap_slope, Out* out) {
  using T = typename Ops::T;
  using V = typename Ops::V;
  constexpr int W = Ops::kWidth;
  constexpr bool kRounds = !std::is_same_v<Out, T>;
  double lost = 0;
  for (int64_t first = 0; first < n; first += kSumBlock) {
    const int64_t end = std::min(n, first + kSumBlock);
    V rest = Ops::set(0);
    int64_t j = first;
    if (!c && !cap_slope) {
      for (; j + W <= end; j += W) {
        const V g = Ops::exp(Ops::load(z + j) * scale - r.shift) * r.slope - r.offset;
        Ops::store(out + j, g);
        if constexpr (kRounds) rest += g - Ops::load(out + j);
      }
    } else {
      for (; j + W <= end; j += W) {
        V g = Ops::exp(Ops::load(z + j) * scale - r.shift) * r.slope;
        g -= c ? Ops::load(c + j) * r.offset : Ops::set(r.offset);
        if (cap_slope) g *= Ops::load(cap_slope + j);
        Ops::store(out + j, g);
        if constexpr (kRounds) rest += g - Ops::load(out + j);
      }
    }
    if (j < end) {
      const int64_t count = end - j;
      V g = Ops::exp(load_tail<Ops>(z + j, count, T(0)) * scale - r.shift) * r.slope;
      g -= c ? load_tail<Ops>(c + j, count, T(0)) * r.offset : Ops::set(r.offset);
      if (cap_slope) g *= load_tail<Ops>(cap_slope + j, count, T(0));
      store_tail<Ops>(out + j, g, count);
      if constexpr (kRounds)
        rest += Ops::select(Ops::first_lanes(count), g - load_tail<Ops>(out + j, count, T(0)), Ops::set(0));
    }
    if constexpr (kRounds) lost += Ops::sum(rest);
  }
  return T(lost);
}

// The lowest class with the largest logit; as in torch.argmax the first NaN wins.
template <class In, class T>
int64_t argmax(const In* z, int64_t n, T scale, T largest, bool may_be_nan) {
  if (may_be_nan) {
    for (int64_t j = 0; j < n; ++j) {
      const T l = T(widen(z[j])) * scale;
      if (l != l) return j;
    }
  }
  constexpr int64_t kBlock = 64;
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t end = std::min(n, first + kBlock);
    bool found = false;
    for (int64_t j = first; j < end; ++j) found |= T(widen(z[j])) * scale == largest;
    for (int64_t j = first; found && j < end; ++j) {
      if (T(widen(z[j])) * scale == largest) return j;
    }
  }
  return 0;
}

// Statistics over z, already final but for the factor `scale`. With t outside [0, n) no class is left out, and that of
// the target's logit is the first one's.
template <class Ops, class In>
SF_INLINE RowStats<typename Ops::T> statistics(const In* z, int64_t n, int64_t t, typename Ops::T scale) {
  using T = typename Ops::T;
  constexpr T kLowest = -std::numeric_limits<T>::infinity();
  const bool known = t >= 0 && t < n;
  const int64_t before = known ? t : n, after = known ? t + 1 : n;
  RowStats<T> s;
  s.max_other = max_logit<Ops>(z + after, n - after, scale, max_logit<Ops>(z, before, scale, kLowest));
  // All others at -inf: any finite shift gives their exact sum, 0, and lets a NaN through.
  const T shift = s.max_other == kLowest ? T(0) : s.max_other;
  s.sum_other = T(sum_exp<Ops>(z, before, scale, shift) + sum_exp<Ops>(z + after, n - after, scale, shift));
  s.target_logit = n == 0 ? std::numeric_limits<T>::quiet_NaN() : T(widen(z[known ? t : 0])) * scale;
  s.smooth = 0;
  return s;
}

template <class In, class Out>
struct RowKernel {
  // Rows [begin, end) of the chunk, all live. buffer: 2 V elements where the options need final logits of their own,
  // else null.
  template <class Ops>
  static SF_INLINE void run(const RowParams* params, int64_t begin, int64_t end, typename Ops::T* buffer) {
    using T = typename Ops::T;
    const RowParams& p = *params;
    const RowConstants<T> constants = row_constants<T>(p);
    const int64_t n = p.num_classes;
    const T* bias = static_cast<const T*>(p.bias);
    const T* all_weights = static_cast<const T*>(p.weight);
    const T* weight = all_weights ? all_weights + p.first_class : nullptr;
    const T* token_weight = static_cast<const T*>(p.token_weight);
    const T* upstream = static_cast<const T*>(p.upstream);
    T* row_stats = static_cast<T*>(p.row_stats);
    const T cap = constants.softcap;
    T* cap_slope = cap != T(0) ? buffer + n : nullptr;

    for (int64_t k = begin; k < end; ++k) {
      const int64_t i = p.chunk.row_index[p.chunk.first + k], row = p.by_row_index ? i : k;
      const int64_t target = p.target[i + p.shift];
      const bool known = target >= p.first_class && target - p.first_class < n;
      const int64_t t = known ? target - p.first_class : -1;  // its place among these logits
      const In* z = static_cast<const In*>(p.logits) + row * p.logits_pitch;
      if (buffer) final_logits<Ops>(z, bias, constants.logit_scale, cap, n, buffer, cap_slope);

      RowStats<T> s;
      if (p.read_stats) {
        const T* read = row_stats + 4 * row;
        s = {read[0], read[1], read[2], read[3]};
      } else {
        s = buffer ? statistics<Ops>(buffer, n, t, T(1)) : statistics<Ops>(z, n, t, constants.logit_scale);
        if (constants.smoothing > T(0)) s.smooth = T(sum_above<Ops>(buffer, weight, n, smooth_base(s.target_logit)));
        if (row_stats) {
          T* written = row_stats + 4 * row;
          written[0] = s.max_other, written[1] = s.sum_other, written[2] = s.target_logit, written[3] = s.smooth;
        }
      }

      // Only a target that count_targets has not seen can be no class: a caller of the ops over a slice may pass one.
      const bool valid = target >= 0 && target < p.total_classes;
      const T target_weight = !all_weights ? T(1) : valid ? all_weights[target] : T(NAN);
      const RowResult<T> r = row_result(s, constants, target_weight, token_weight ? token_weight[i + p.shift] : T(1),
                                        upstream ? upstream[i * p.upstream_stride] : T(1));
      if (p.ce) static_cast<T*>(p.ce)[i] = r.ce;
      if (p.z) static_cast<T*>(p.z)[i] = r.z;
      if (p.logsumexp) static_cast<T*>(p.logsumexp)[i] = r.logsumexp;
      if (p.correct || p.predicted) {
        const bool nan = s.sum_other != s.sum_other || s.target_logit != s.target_logit;
        int64_t best = t;
        if (nan || p.predicted || s.max_other == s.target_logit) {
          const T largest = s.max_other > s.target_logit ? s.max_other : s.target_logit;
          if (nan || s.max_other >= s.target_logit) {
            best = buffer ? argmax(buffer, n, T(1), largest, nan) : argmax(z, n, constants.logit_scale, largest, nan);
          }
        } else if (s.max_other > s.target_logit) {
          best = -1;
        }
        if (p.correct) p.correct[i] = known && best == t ? 1.0f : 0.0f;
        if (p.predicted) p.predicted[i] = best + p.first_class;
      }

      if (p.grad) {
        Out* g = static_cast<Out*>(p.grad) + row * p.grad_pitch;
        const int64_t before = known ? t : n, after = known ? t + 1 : n;
        const auto part = [&](int64_t first, int64_t count) {
          const T* c = weight ? weight + first : nullptr;
          if (buffer)
            return gradient<Ops>(static_cast<const T*>(buffer) + first, count, T(1), r, c,
                                 static_cast<const T*>(cap_slope ? cap_slope + first : nullptr), g + first);
          return gradient<Ops>(z + first, count, constants.logit_scale, r, c, static_cast<const T*>(nullptr),
                               g + first);
        };
        T residue = part(0, before) + part(after, n - after);
        if (known) {
          const T own = cap_slope ? r.target * cap_slope[t] : r.target;
          g[t] = narrow<Out>(own);
          residue += own - T(widen(g[t]));
        }
        if (p.residue) static_cast<T*>(p.residue)[k] = residue;
      }
    }
  }
};

template <class In, class Out, class T>
void live_part(const RowParams& p, int64_t live) {
  const LossOptions& o = p.options;
  // Scaled logits are stored, and so rounded, before a maximum is taken off: fused with the multiplication, the
  // difference of two huge ones would be the rounding of one.
  const bool scaled = option_logit_scale(o) != 1.0;
  const bool buffered = p.bias || p.weight || o.softcap != 0 || o.label_smoothing > 0 || scaled;
  parallel(live, p.num_classes * 8, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<T[]> buffer(buffered ? new T[size_t(p.num_classes) * 2] : nullptr);
    if constexpr (std::is_same_v<T, double>)
      RowKernel<In, Out>::template run<DoubleOps>(&p, begin, end, buffer.get());
    else
      dispatch<RowKernel<In, Out>>(&p, begin, end, buffer.get());
  });
}

// Ignored rows: results 0, predicted -1, gradient 0.
template <class T>
void ignored_part(const RowParams& p, int64_t live) {
  parallel(p.chunk.size - live, p.grad ? p.num_classes : 1, [&](int64_t begin, int64_t end) {
    for (int64_t k = live + begin; k < live + end; ++k) {
      const int64_t i = p.chunk.row_index[p.chunk.first + k], row = p.by_row_index ? i : k;
      if (p.ce) static_cast<T*>(p.ce)[i] = 0;
      if (p.z) static_cast<T*>(p.z)[i] = 0;
      if (p.logsumexp) static_cast<T*>(p.logsumexp)[i] = 0;
      if (p.correct) p.correct[i] = 0;
      if (p.predicted) p.predicted[i] = -1;
      if (p.row_stats && !p.read_stats) std::fill_n(static_cast<T*>(p.row_stats) + 4 * row, 4, T(0));
      if (p.grad) {
        const int64_t bytes = p.grad_dtype == DType::f64 ? 8 : p.grad_dtype == DType::f32 ? 4 : 2;
        std::memset(element(p.grad, p.grad_dtype, row * p.grad_pitch), 0, size_t(p.num_classes * bytes));
      }
    }
  });
}

template <class In>
void float_rows(const RowParams& p, int64_t live) {
  if constexpr (std::is_same_v<In, float>) {
    switch (p.grad ? p.grad_dtype : DType::f32) {
      case DType::bf16:
        return live_part<float, Bf16, float>(p, live);
      case DType::f16:
        return live_part<float, Half, float>(p, live);
      default:
        return live_part<float, float, float>(p, live);
    }
  } else {
    live_part<In, In, float>(p, live);
  }
}

}  // namespace

// logits: the type of the sums, or bf16 or f16 with a gradient of the same type.
void rows_cpu(const RowParams& p) {
  const int64_t live = live_rows(p.chunk);
  switch (p.logits_dtype) {
    case DType::f64:
      live_part<double, double, double>(p, live);
      break;
    case DType::f32:
      float_rows<float>(p, live);
      break;
    case DType::bf16:
      float_rows<Bf16>(p, live);
      break;
    case DType::f16:
      float_rows<Half>(p, live);
      break;
  }
  with_acc(p.acc, [&](auto tag) { ignored_part<typename decltype(tag)::type>(p, live); });
}

}  // namespace syncfree
