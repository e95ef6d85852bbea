// dX = alpha (v E W + g_t w_t - offset sum_j c_j w_j), the last with label smoothing: a GEMM whose epilogue applies the
// row factors and adds the target's row of W as the rows go home. Where two parts of the reduction fill the last wave better, both are added up in fp32 rows, which a second
// kernel brings home.
#include "../hopper/gemm.cuh"
#include "device.cuh"
#include "fused.h"

namespace syncfree {
namespace {

using namespace sm90;

using Product = Cooperative<false, true, Epilogue::rows, Bound::m>;
static_assert(Product::kBM * Product::kCluster == kRowGroup);
using ShareProduct = Cooperative<false, true, Epilogue::rows_share, Bound::m>;
using SmoothedProduct = Cooperative<false, true, Epilogue::rows_smoothed, Bound::m>;
using SplitProduct = Cooperative<false, true, Epilogue::f32_add, Bound::m>;
constexpr int kThreads = 256;
constexpr int64_t kClusters = 66;          // of two blocks, on 132 multiprocessors: only steers the choice of parts
constexpr int64_t kWorthSplitting = 4096;  // classes: shorter reductions are over before the second part pays

int64_t tiles(int64_t rows, int64_t hidden) {
  return (rows + kRowGroup - 1) / kRowGroup * ((hidden + Product::kBN - 1) / Product::kBN);
}

// How long dX takes, or dX and dW, which together can be no faster than all multiprocessors nor than dX's whole waves.
double waves(int64_t rows, int64_t hidden, int parts, bool beside_dw) {
  const int64_t dx = tiles(rows, hidden);
  const double alone = double((dx * parts + kClusters - 1) / kClusters) / parts, both = 2.0 * double(dx) / kClusters;
  return !beside_dw || both < alone ? alone : both;
}

template <class Out>
__global__ void __launch_bounds__(kThreads) fused_store_kernel(FusedDxParams p) {
  begin_after_previous_launch();
  const int64_t k = blockIdx.x;
  const ChunkRows chunk(p.chunk);
  if (k >= chunk.live) return;
  Out* out = static_cast<Out*>(p.out) + (p.share ? k : chunk.row(p.chunk, k)) * p.hidden;
  const float alpha = gradient_factor(p.chunk.counts, p.chunk.upstream), v = p.rows.v[k] * alpha,
              g = p.rows.g_target[chunk.first + k] * alpha,
              offset = p.smooth ? p.rows.offset[chunk.first + k] * alpha : 0.f;
  const int t = p.rows.target[k];
  const float* product = p.product + k * p.hidden;
  const __nv_bfloat16* w = static_cast<const __nv_bfloat16*>(p.weight) + int64_t(t < 0 ? 0 : t) * p.weight_pitch;
  for (int64_t i = threadIdx.x; i < p.hidden / 8; i += kThreads) {
    const Pack<float> a = reinterpret_cast<const Pack<float>*>(product + i * 8)[0],
                      b = reinterpret_cast<const Pack<float>*>(product + i * 8)[1];
    const Pack<__nv_bfloat16> c = reinterpret_cast<const Pack<__nv_bfloat16>*>(w)[i];
    float y[8];
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] = v * a.v[e], y[4 + e] = v * b.v[e];
    if (t >= 0) {
#pragma unroll
      for (int e = 0; e < 8; ++e) y[e] = fmaf(g, to_float(c.v[e]), y[e]);
    }
    if (p.smooth) subtract8(offset, p.smooth, i, y);
    store8(out + i * 8, y);
  }
}

}  // namespace

int fused_dx_parts(int64_t rows, int64_t num_classes, int64_t hidden, bool beside_dw) {
  return num_classes >= kWorthSplitting && waves(rows, hidden, 2, beside_dw) < 0.95 * waves(rows, hidden, 1, beside_dw)
             ? 2
             : 1;
}

double fused_cost(int64_t rows, int64_t size, int64_t num_classes, int64_t hidden, bool beside_dw) {
  constexpr double kChunk = 0.1;  // small kernels, tails, and dW's sums read and written
  const int parts = fused_dx_parts(size, num_classes, hidden, beside_dw);
  double cost = 0;
  for (int64_t first = 0; first < rows; first += size) {
    const int64_t live = rows - first < size ? rows - first : size;
    // The logits are as many tiles as dX, but small ones that fill every wave.
    cost += waves(live, hidden, parts, beside_dw) + double(tiles(live, hidden)) / kClusters + kChunk;
  }
  return cost;
}

cudaError_t launch_fused_dx(const FusedDxParams& p, cudaStream_t stream) {
  const Matrix e{p.e, p.chunk.size, p.num_classes, p.e_pitch}, w{p.weight, p.num_classes, p.hidden, p.weight_pitch};
  GemmArgs args{};
  args.chunk = p.chunk;
  args.splits = p.parts;
  if (p.parts > 1) {
    const size_t bytes = size_t(p.chunk.size) * p.hidden * sizeof(float);
    if (cudaError_t error = cudaMemsetAsync(p.product, 0, bytes, stream)) return error;
    return launch_gemm<SplitProduct>(e, w, Matrix{p.product, p.chunk.size, p.hidden, p.hidden}, args, stream);
  }
  if (p.out_dtype == DType::f64) return cudaErrorInvalidValue;
  args.target = p.rows.target, args.v = p.rows.v, args.g_target = p.rows.g_target;
  args.weight = static_cast<const __nv_bfloat16*>(p.weight), args.weight_pitch = p.weight_pitch;
  args.out = p.out, args.out_dtype = p.out_dtype;
  args.offset = p.rows.offset, args.smooth = p.smooth;
  if (p.share) return launch_gemm<ShareProduct>(e, w, Matrix{}, args, stream);
  return p.smooth ? launch_gemm<SmoothedProduct>(e, w, Matrix{}, args, stream)
                  : launch_gemm<Product>(e, w, Matrix{}, args, stream);
}

cudaError_t launch_fused_dx_store(const FusedDxParams& p, cudaStream_t stream) {
  if (p.parts == 1) return cudaSuccess;
  const unsigned blocks = unsigned(p.chunk.size);
  switch (p.out_dtype) {
    case DType::f32:
      return launch_dependent(fused_store_kernel<float>, blocks, kThreads, stream, p);
    case DType::bf16:
      return launch_dependent(fused_store_kernel<__nv_bfloat16>, blocks, kThreads, stream, p);
    case DType::f16:
      return launch_dependent(fused_store_kernel<__half>, blocks, kThreads, stream, p);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace syncfree
