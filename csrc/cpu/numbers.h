// Element types of CPU memory, their conversions, and loops over rows that torch's thread pool runs.
//
// bf16 and f16 are bit patterns here, converted with integer arithmetic that every compiler vectorises: rounding to
// nearest, ties to even; NaN stays NaN, overflow becomes inf, subnormals are kept.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../common/params.h"

namespace syncfree {

struct Bf16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

inline uint32_t bits_of(float v) {
  uint32_t u;
  std::memcpy(&u, &v, sizeof u);
  return u;
}
inline float float_of(uint32_t u) {
  float v;
  std::memcpy(&v, &u, sizeof v);
  return v;
}

inline float widen(float v) {
  return v;
}
inline double widen(double v) {
  return v;
}
inline float widen(Bf16 v) {
  return float_of(uint32_t(v.bits) << 16);
}
inline float widen(Half v) {
  const uint32_t sign = uint32_t(v.bits & 0x8000u) << 16, magnitude = uint32_t(v.bits & 0x7fffu) << 13;
  const uint32_t rebias =
      magnitude >= 0x0f800000u ? 0x70000000u : 0x38000000u;  // exponent 31 is inf or NaN: it moves to 255
  // A subnormal is read as 2^-14 (1 + fraction), less 2^-14: exact.
  const float subnormal = float_of(magnitude + 0x38800000u) - float_of(0x38800000u);
  return float_of((magnitude < 0x00800000u ? bits_of(subnormal) : magnitude + rebias) | sign);
}

inline Bf16 round_to_bf16(float v) {
  const uint32_t u = bits_of(v);
  const uint32_t rounded = u + 0x7fffu + ((u >> 16) & 1u);
  return {uint16_t((v != v ? u | 0x400000u : rounded) >> 16)};
}
inline Half round_to_half(float v) {
  const uint32_t u = bits_of(v), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  const uint32_t capped = a < 0x47800000u ? a : 0x47800000u;  // 2^16 and above become inf, as does what rounds up to it
  const uint32_t normal = (capped + 0xfffu + ((capped >> 13) & 1u) - 0x38000000u) >> 13;
  // Below 2^-14 the addition of 1/2 leaves the multiple of 2^-24 in the low bits, rounded by the adder.
  const uint32_t subnormal = bits_of(float_of(a) + 0.5f) - 0x3f000000u;
  const uint32_t finite = a < 0x38800000u ? subnormal : normal;
  return {uint16_t((a > 0x7f800000u ? 0x7e00u : finite) | sign)};
}

template <class Out, class T>
inline Out narrow(T v) {
  if constexpr (std::is_same_v<Out, Bf16>)
    return round_to_bf16(float(v));
  else if constexpr (std::is_same_v<Out, Half>)
    return round_to_half(float(v));
  else
    return Out(v);
}

template <class T>
struct Tag {
  using type = T;
};

// Calls f(Tag<element type>{}).
template <class F>
void with_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f32:
      return f(Tag<float>{});
    case DType::f64:
      return f(Tag<double>{});
    case DType::bf16:
      return f(Tag<Bf16>{});
    case DType::f16:
      return f(Tag<Half>{});
  }
}

// Calls f(Tag<float>{}) or f(Tag<double>{}).
template <class F>
void with_acc(DType acc, const F& f) {
  if (acc == DType::f64)
    f(Tag<double>{});
  else
    f(Tag<float>{});
}

inline const void* element(const void* p, DType type, int64_t offset) {
  const int64_t bytes = type == DType::f64 ? 8 : type == DType::f32 ? 4 : 2;
  return static_cast<const char*>(p) + offset * bytes;
}
inline void* element(void* p, DType type, int64_t offset) {
  return const_cast<void*>(element(static_cast<const void*>(p), type, offset));
}

inline int64_t live_rows(const Chunk& c) {
  return std::clamp<int64_t>(int64_t(c.counts[kCountRows]) - c.first, 0, c.size);
}

// f(begin, end) over [0, count) in parallel; cost is the number of elements that one index touches.
template <class F>
void parallel(int64_t count, int64_t cost, const F& f) {
  constexpr int64_t kElementsPerTask = 1 << 15;
  if (count <= 0) return;
  const int64_t grain = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(cost, 1));
  if (count <= grain) return f(int64_t(0), count);
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { f(begin, end); });
}

}  // namespace syncfree
