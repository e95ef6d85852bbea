// Per-row losses to results, summed in a fixed order in double; and the factor that turns products with g into
// gradients.
#include "../../common/formulas.h"
#include "device.cuh"
#include "launch.h"

namespace syncfree {
namespace {

constexpr int kThreads = 1024;

__global__ void __launch_bounds__(kThreads) reduce_kernel(ReduceParams p) {
  __shared__ double shared[kThreads / kWarp];
  const float *ce = static_cast<const float*>(p.ce), *z = static_cast<const float*>(p.z);
  double ce_sum = 0, z_sum = 0, correct = 0;
  for (int64_t i = threadIdx.x; i < p.rows; i += kThreads) {
    ce_sum += double(ce[i]);
    z_sum += double(z[i]);
    if (p.correct) correct += double(p.correct[i]);
  }
  ce_sum = block_reduce<kThreads>(ce_sum, Sum(), shared);
  z_sum = block_reduce<kThreads>(z_sum, Sum(), shared);
  correct = block_reduce<kThreads>(correct, Sum(), shared);
  if (threadIdx.x == 0) {
    z_sum *= p.counts[kInverseZ];
    *static_cast<float*>(p.loss) = float(ce_sum * p.counts[kInverseCe] + z_sum);
    *static_cast<float*>(p.z_loss) = float(z_sum);
    if (p.accuracy) *p.accuracy = float(correct / fmax(p.counts[kCountRows], 1.0));
  }
}

__global__ void __launch_bounds__(kThreads) add_kernel(const float* ce, const float* z, float* loss, int64_t rows) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < rows) loss[i] = ce[i] + z[i];
}

__global__ void alpha_kernel(AlphaParams p) {
  double factor = p.counts[kInverseCe];
  if (p.upstream_scalar) factor *= double(*static_cast<const float*>(p.upstream_scalar));
  if (p.half)
    factor = ldexp(factor, -half_exponent(p.counts, option_logit_scale(p.options), option_z_weight(p.options)));
  float* alpha = static_cast<float*>(p.alpha);
  alpha[0] = float(factor);
  alpha[1] = 0.f;
  alpha[2] = 1.f;
}

}  // namespace

cudaError_t launch_reduce(const ReduceParams& p, cudaStream_t stream) {
  if (p.reduction == Reduction::none) {
    if (p.rows == 0) return cudaSuccess;
    add_kernel<<<unsigned((p.rows + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
        static_cast<const float*>(p.ce), static_cast<const float*>(p.z), static_cast<float*>(p.loss), p.rows);
  } else {
    reduce_kernel<<<1, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

cudaError_t launch_alpha(const AlphaParams& p, cudaStream_t stream) {
  alpha_kernel<<<1, 1, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace syncfree
