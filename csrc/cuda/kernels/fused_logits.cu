// E and its row sums from hidden states and the head: the logits are never stored. See fused.h.
#include "../hopper/gemm.cuh"
#include "device.cuh"
#include "fused.h"

namespace syncfree {
namespace {

using namespace sm90;

template <Epilogue E, Logit L>
using Logits = PingPong<false, false, E, Bound::m, L>;
using Plain = Logits<Epilogue::row_exp, Logit::plain>;
static_assert(Plain::kBN == kLogitsTileColumns && Plain::kBM * Plain::kCluster == kRowGroup);

constexpr int kThreads = 256;
// log2 of E of a row's maximum after a repair: the sum over any vocabulary stays far below 2^127, and v = 1 / sum far
// above 2^-126.
constexpr float kRepairedMaximum = 0.f;

template <Epilogue E, Logit L>
cudaError_t launch_as(const FusedLogitsParams& p, bool repair, cudaStream_t stream) {
  GemmArgs args{};
  args.chunk = p.chunk;
  if (repair) args.any = p.rows.any, args.only = p.rows.only;
  args.exponent = p.rows.exponent;
  args.target = p.rows.target;
  args.sums = static_cast<float2*>(p.rows.sums);
  args.target_logit = p.rows.target_logit;
  args.best = static_cast<float2*>(p.rows.best);
  args.scale_log2e = float(p.options.logit_scale) * kLog2e;
  args.scale_ptr = p.options.logit_scale_ptr;
  args.bias = p.bias, args.softcap = softcap_log2(p.options), args.inverse_softcap = 1.f / args.softcap;
  const Matrix x{p.gathered, p.chunk.size, p.hidden, p.hidden}, w{p.weight, p.num_classes, p.hidden, p.weight_pitch},
      e{p.e, p.chunk.size, p.num_classes, p.e_pitch};
  return launch_gemm<Logits<E, L>>(x, w, e, args, stream);
}

template <Epilogue E>
cudaError_t launch(const FusedLogitsParams& p, bool repair, cudaStream_t stream) {
  if (p.options.softcap > 0) return launch_as<E, Logit::capped>(p, repair, stream);
  return p.bias ? launch_as<E, Logit::biased>(p, repair, stream) : launch_as<E, Logit::plain>(p, repair, stream);
}

cudaError_t launch_either(const FusedLogitsParams& p, bool repair, cudaStream_t stream) {
  if (p.rows.best)
    return p.e ? launch<Epilogue::row_exp_argmax>(p, repair, stream)
               : launch<Epilogue::row_stats_argmax>(p, repair, stream);
  return p.e ? launch<Epilogue::row_exp>(p, repair, stream) : launch<Epilogue::row_stats>(p, repair, stream);
}

// One thread a row: the exponent that puts the largest E of a bad row at 1.
__global__ void __launch_bounds__(kThreads) repair_exponent_kernel(FusedChunk chunk, FusedRows rows, int64_t tiles) {
  begin_after_previous_launch();
  if (!*rows.any) return;
  const int64_t k = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (k >= ChunkRows(chunk).live || !rows.bad[k]) return;
  const float2* sums = static_cast<const float2*>(rows.sums);
  float m = -INFINITY;
  for (int64_t t = 0; t < tiles; ++t) m = fmaxf(m, sums[fused_pair(k, t, tiles)].x);
  rows.exponent[k] = rintf(m) - kRepairedMaximum;
}

}  // namespace

cudaError_t launch_fused_logits(const FusedLogitsParams& p, cudaStream_t stream) {
  return launch_either(p, false, stream);
}

cudaError_t launch_fused_repair(const FusedLogitsParams& p, int64_t tiles, cudaStream_t stream) {
  if (cudaError_t e = launch<Epilogue::row_max>(p, true, stream)) return e;
  if (cudaError_t e = launch_dependent(repair_exponent_kernel, unsigned((p.chunk.size + kThreads - 1) / kThreads),
                                       kThreads, stream, p.chunk, p.rows, tiles))
    return e;
  return launch_either(p, true, stream);
}

}  // namespace syncfree
