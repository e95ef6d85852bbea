// dX = alpha (v E W + g_t w_t): a GEMM into fp32 rows, then the row factors and the target's row of W as the rows go
// home.
#include "../hopper/gemm.cuh"
#include "device.cuh"
#include "fused.h"

namespace syncfree {
namespace {

using namespace sm90;

using Product = Cooperative<false, true, Epilogue::f32, Bound::m>;
using SplitProduct = Cooperative<false, true, Epilogue::f32_add, Bound::m>;
constexpr int kThreads = 256;
constexpr int64_t kClusters = 66;  // of two blocks, on 132 multiprocessors: only steers the choice of splits

constexpr int64_t kWorthSplitting = 4096;  // classes: shorter reductions are over before the second part pays

// Two parts of the reduction when that fills the last wave better.
bool better_split(int64_t rows, int64_t hidden, int64_t num_classes) {
  if (num_classes < kWorthSplitting) return false;
  const int64_t tiles = (rows + 255) / 256 * ((hidden + Product::kBN - 1) / Product::kBN);
  const auto waves = [](int64_t n) { return double((n + kClusters - 1) / kClusters); };
  return waves(2 * tiles) / 2 < 0.95 * waves(tiles);
}

template <class Out>
__global__ void __launch_bounds__(kThreads) fused_store_kernel(FusedDxParams p) {
  const int64_t k = blockIdx.x;
  const ChunkRows chunk(p.chunk);
  const int64_t row = chunk.row(p.chunk, k);
  if (row < 0) return;
  Out* out = static_cast<Out*>(p.out) + row * p.hidden;
  const bool live = k < chunk.live;
  const float alpha = *p.alpha, v = live ? p.rows.v[k] * alpha : 0.f,
              g = live ? p.rows.g_target[chunk.first + k] * alpha : 0.f;
  const int t = live ? p.rows.target[k] : -1;
  const float* product = p.product + k * p.hidden;
  const __nv_bfloat16* w = static_cast<const __nv_bfloat16*>(p.weight) + int64_t(t < 0 ? 0 : t) * p.weight_pitch;
  for (int64_t i = threadIdx.x; i < p.hidden / 8; i += kThreads) {
    float y[8] = {};
    if (live) {
      const Pack<float> a = reinterpret_cast<const Pack<float>*>(product + i * 8)[0],
                        b = reinterpret_cast<const Pack<float>*>(product + i * 8)[1];
      const Pack<__nv_bfloat16> c = reinterpret_cast<const Pack<__nv_bfloat16>*>(w)[i];
#pragma unroll
      for (int e = 0; e < 4; ++e) y[e] = v * a.v[e], y[4 + e] = v * b.v[e];
      if (t >= 0) {
#pragma unroll
        for (int e = 0; e < 8; ++e) y[e] = fmaf(g, to_float(c.v[e]), y[e]);
      }
    }
#pragma unroll
    for (int b = 0; b < 8 / Pack<Out>::kSize; ++b) {
      Pack<Out> z;
#pragma unroll
      for (int e = 0; e < Pack<Out>::kSize; ++e) z.v[e] = from_float<Out>(y[b * Pack<Out>::kSize + e]);
      reinterpret_cast<Pack<Out>*>(out + i * 8)[b] = z;
    }
  }
}

}  // namespace

cudaError_t launch_fused_dx(const FusedDxParams& p, cudaStream_t stream) {
  GemmArgs args{};
  args.chunk = p.chunk;
  const Matrix e{p.e, p.chunk.size, p.num_classes, p.e_pitch}, w{p.weight, p.num_classes, p.hidden, p.weight_pitch},
      d{p.product, p.chunk.size, p.hidden, p.hidden};
  if (better_split(p.chunk.size, p.hidden, p.num_classes)) {
    args.splits = 2;
    if (cudaError_t error = cudaMemsetAsync(p.product, 0, size_t(p.chunk.size) * p.hidden * sizeof(float), stream))
      return error;
    if (cudaError_t error = launch_gemm<SplitProduct>(e, w, d, args, stream)) return error;
  } else {
    if (cudaError_t error = launch_gemm<Product>(e, w, d, args, stream)) return error;
  }
  const unsigned blocks = unsigned(p.chunk.size);
  switch (p.out_dtype) {
    case DType::f32:
      fused_store_kernel<float><<<blocks, kThreads, 0, stream>>>(p);
      break;
    case DType::bf16:
      fused_store_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(p);
      break;
    case DType::f16:
      fused_store_kernel<__half><<<blocks, kThreads, 0, stream>>>(p);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace syncfree
