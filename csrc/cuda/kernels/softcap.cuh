// tanh and its derivative for the softcap, for kernels that have no time for tanhf.
//
// With q = e^(-2 |y|) and r = 2 / (1 + q): tanh |y| = r - 1, and the derivative is q r^2, where nothing cancels. tanh
// is wrong by 2.5e-7 at most and 7e-8 in the root mean square, absolutely. With a softcap of 100 that is 2.5e-5 of E
// at most, of which rounding it to bfloat16 takes 2e-3. tanh.approx (2^-11) is not enough.
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
  const float q = exp2_ftz(fabsf(y) * -2.885390081777927f);  // -2 log2(e)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(fmaf(q, 0.5f, 0.5f)));
  return {copysignf(r - 1.f, y), q * r * r};
}

// The bound in the units of the kernels, which are those of log2; 0: none.
__host__ __device__ __forceinline__ float softcap_log2(const LossOptions& o) {
  return static_cast<float>(o.softcap * 1.4426950408889634);
}

}  // namespace syncfree
