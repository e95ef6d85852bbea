// softcap * tanh(s / softcap) and its derivative, for kernels that have no time for tanhf.
//
// With q = e^(-2 |y|): tanh |y| = (1 - q) / (1 + q), and the derivative is 4 q / (1 + q)^2, where nothing cancels. Below
// 0.55 1 - q would, and a polynomial takes its place: tanh y = y + y u P(u), u = y^2, P a least-maximum fit of degree 3
// to the relative error, 4e-8. In float32 both are within 3e-7 of tanh, relative, so the capped logit is as exact as the
// logit is; tanh.approx (2^-11) is not enough.
#pragma once

#include "../../common/params.h"

namespace syncfree {

__device__ __forceinline__ float exp2_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

struct Softcapped {
  float tanh, slope;
};

__device__ __forceinline__ Softcapped softcapped(float y) {
  const float a = fabsf(y), u = y * y, q = exp2_ftz(a * -2.885390081777927f);  // -2 log2(e)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.f + q));
  float p = fmaf(u, 0.01643756777f, -0.05267180502f);
  p = fmaf(u, p, 0.1332072467f);
  p = fmaf(u, p, -0.3333294690f);
  return {a < 0.55f ? fmaf(p * u, y, y) : copysignf((1.f - q) * r, y), 4.f * q * r * r};
}

// The bound in the units of the kernels, which are those of log2; 0: none.
__host__ __device__ __forceinline__ float softcap_log2(const LossOptions& o) {
  return static_cast<float>(o.softcap * 1.4426950408889634);
}

}  // namespace syncfree
