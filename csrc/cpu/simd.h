// Vectors of floats for the row kernels, and the choice of the widest instruction set at run time.
//
// A kernel is a struct with an always-inlined `template <class Ops> static void run(args...)`;
// dispatch<Kernel>(args...) compiles it for the baseline of the target and, on x86-64, for AVX2 and AVX-512, and calls
// the best one. FloatOps works on GCC vector extensions of one native register, so the same text serves NEON, SSE2,
// AVX2 and AVX-512; DoubleOps is scalar. SYNCFREE_BASELINE_ONLY leaves the baseline alone, for tests of it.
#pragma once

#include <cmath>
#include <limits>

#include "numbers.h"

#define SF_INLINE inline __attribute__((always_inline))
#if defined(__x86_64__) && !defined(SYNCFREE_BASELINE_ONLY)
#define SF_X86_DISPATCH 1
#define SF_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define SF_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#endif

// Vectors never cross a call that is not inlined, so no ABI depends on their width.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace syncfree {

template <int Bytes>
struct Vectors {
  typedef float F32 __attribute__((vector_size(Bytes)));
  typedef int32_t I32 __attribute__((vector_size(Bytes)));
  typedef uint32_t U32 __attribute__((vector_size(Bytes)));
  typedef uint16_t U16 __attribute__((vector_size(Bytes / 2)));
};

template <int Bytes>
struct FloatOps {
  using T = float;
  static constexpr int kWidth = Bytes / 4;
  using V = typename Vectors<Bytes>::F32;
  using I = typename Vectors<Bytes>::I32;
  using U = typename Vectors<Bytes>::U32;
  using H = typename Vectors<Bytes>::U16;

  static SF_INLINE V set(float x) { return x - V{}; }
  static SF_INLINE V select(I mask, V a, V b) { return mask ? a : b; }
  static SF_INLINE V max(V a, V b) { return a > b ? a : b; }

  static SF_INLINE V load(const float* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static SF_INLINE V load(const Bf16* p) { return V(load_u16(p) << 16); }
  static SF_INLINE V load(const Half* p) {
    const U h = load_u16(p), sign = (h & 0x8000u) << 16, magnitude = (h & 0x7fffu) << 13;
    const U rebias = magnitude >= 0x0f800000u ? U{} + 0x70000000u : U{} + 0x38000000u;
    const V subnormal = V(magnitude + 0x38800000u) - set(0x1p-14f);
    return V((magnitude < 0x00800000u ? U(subnormal) : magnitude + rebias) | sign);
  }
  static SF_INLINE void store(float* p, V v) { std::memcpy(p, &v, sizeof v); }
  static SF_INLINE void store(Bf16* p, V v) {
    const U u = U(v), rounded = u + 0x7fffu + ((u >> 16) & 1u);
    store_u16(p, (v != v ? u | 0x400000u : rounded) >> 16);
  }
  static SF_INLINE void store(Half* p, V v) {
    const U u = U(v), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    const U capped = a < 0x47800000u ? a : U{} + 0x47800000u;
    const U normal = (capped + 0xfffu + ((capped >> 13) & 1u) - 0x38000000u) >> 13;
    const U subnormal = U(V(a) + set(0.5f)) - 0x3f000000u;
    const U finite = a < 0x38800000u ? subnormal : normal;
    store_u16(p, (a > 0x7f800000u ? U{} + 0x7e00u : finite) | sign);
  }

  // e^x for x <= 0 within 2 ulp; 0 where the result would be subnormal; NaN stays NaN.
  static SF_INLINE V exp(V x) {
    constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer, which the low bits then hold
    const V shifted = x * 1.44269504f + kRound, n = shifted - kRound;
    const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, the first exact in 10 bits
    V poly = set(1.381459837e-03f) * r + 8.368717050e-03f;
    poly = poly * r + 4.166838806e-02f;
    poly = poly * r + 1.666652063e-01f;
    poly = poly * r + 4.999999345e-01f;
    poly = (poly * r) * r + r + 1.0f;
    const V power = V((U(shifted) << 23) + 0x3f800000u);
    return x <= -87.33f ? V{} : poly * power;
  }

  // tanh x and 4q / (1 + q)^2 = 1 - tanh^2 x, q = e^(-2|x|).
  static SF_INLINE void tanh(V x, V& value, V& slope) {
    const V a = x < 0.0f ? -x : x;
    const V q = exp(a * -2.0f), d = 1.0f / (q + 1.0f);
    const V large = (1.0f - q) * d;
    const V x2 = x * x;
    V poly = set(2.097720039e-03f) * x2 - 8.128999419e-03f;
    poly = poly * x2 + 2.168164242e-02f;
    poly = poly * x2 - 5.394339978e-02f;
    poly = poly * x2 + 1.333318054e-01f;
    poly = poly * x2 - 3.333333019e-01f;
    const V small = (poly * x2) * x + x;
    value = a < 0.64f ? small : x < 0.0f ? -large : large;
    slope = 4.0f * q * d * d;
  }

  static SF_INLINE I first_lanes(int64_t count) {
    I lane;
    for (int i = 0; i < kWidth; ++i) lane[i] = i;
    return lane < int32_t(count);
  }
  static SF_INLINE double sum(V v) {
    double s = 0;
    for (int i = 0; i < kWidth; ++i) s += v[i];
    return s;
  }
  static SF_INLINE float max_lane(V v) {
    float m = v[0];
    for (int i = 1; i < kWidth; ++i) m = v[i] > m ? v[i] : m;
    return m;
  }

 private:
  template <class P>
  static SF_INLINE U load_u16(const P* p) {
    H h;
    std::memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, U);
  }
  template <class P>
  static SF_INLINE void store_u16(P* p, U u) {
    const H h = __builtin_convertvector(u, H);
    std::memcpy(p, &h, sizeof h);
  }
};

struct DoubleOps {
  using T = double;
  using V = double;
  using I = bool;
  static constexpr int kWidth = 1;
  static SF_INLINE V set(double x) { return x; }
  static SF_INLINE V select(bool mask, V a, V b) { return mask ? a : b; }
  static SF_INLINE V max(V a, V b) { return a > b ? a : b; }
  static SF_INLINE V load(const double* p) { return *p; }
  static SF_INLINE void store(double* p, V v) { *p = v; }
  static SF_INLINE V exp(V x) { return std::exp(x); }
  static SF_INLINE void tanh(V x, V& value, V& slope) {
    value = std::tanh(x);
    const double q = std::exp(-2.0 * std::fabs(x));
    slope = 4.0 * q / ((1.0 + q) * (1.0 + q));
  }
  static SF_INLINE bool first_lanes(int64_t count) { return count > 0; }
  static SF_INLINE double sum(V v) { return v; }
  static SF_INLINE double max_lane(V v) { return v; }
};

// The first `count` < kWidth elements from p, `fill` in the other lanes.
template <class Ops, class In>
SF_INLINE typename Ops::V load_tail(const In* p, int64_t count, typename Ops::T fill) {
  In part[Ops::kWidth] = {};
  for (int64_t i = 0; i < count; ++i) part[i] = p[i];
  return Ops::select(Ops::first_lanes(count), Ops::load(part), Ops::set(fill));
}

template <class Ops, class Out>
SF_INLINE void store_tail(Out* p, typename Ops::V v, int64_t count) {
  Out part[Ops::kWidth];
  Ops::store(part, v);
  for (int64_t i = 0; i < count; ++i) p[i] = part[i];
}

#if defined(SF_X86_DISPATCH)
enum class Isa { baseline, avx2, avx512 };

inline Isa isa() {
  static const Isa best = [] {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::baseline;
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return wide ? Isa::avx512 : Isa::avx2;
  }();
  return best;
}

template <class Kernel, class... Args>
SF_TARGET_AVX2 void run_avx2(Args... args) {
  Kernel::template run<FloatOps<32>>(args...);
}
template <class Kernel, class... Args>
SF_TARGET_AVX512 void run_avx512(Args... args) {
  Kernel::template run<FloatOps<64>>(args...);
}
#endif

// float kernels only; args are pointers and small values.
template <class Kernel, class... Args>
void dispatch(Args... args) {
#if defined(SF_X86_DISPATCH)
  if (isa() == Isa::avx512) return run_avx512<Kernel>(args...);
  if (isa() == Isa::avx2) return run_avx2<Kernel>(args...);
#endif
  Kernel::template run<FloatOps<16>>(args...);
}

}  // namespace syncfree
