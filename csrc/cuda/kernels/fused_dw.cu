// dW += E^T (alpha v x) for all classes but each row's target; the targets' share is added by fused_targets_kernel.
#include "../hopper/gemm.cuh"
#include "fused.h"

namespace syncfree {
namespace {

using namespace sm90;

template <Epilogue E>
cudaError_t launch(const FusedDwParams& p, cudaStream_t stream) {
  GemmArgs args{};
  args.ticket = p.ticket;
  args.chunk = p.chunk;
  const Matrix e{p.e, p.chunk.size, p.num_classes, p.e_pitch}, x{p.scaled, p.chunk.size, p.hidden, p.hidden},
      d{p.sum, p.num_classes, p.hidden, p.hidden};
  args.low = p.low, args.starts = p.starts, args.load = p.accumulate;
  args.high = static_cast<uint8_t*>(p.sum), args.high_pitch = p.hidden * 2;
  return launch_gemm<PingPongTall<true, true, E, Bound::k>>(e, x, d, args, stream, p.beside_dx);
}

}  // namespace

cudaError_t launch_fused_dw(const FusedDwParams& p, cudaStream_t stream) {
  if (p.low) return launch<Epilogue::split>(p, stream);
  if (p.sum_dtype == DType::f32)
    return p.accumulate ? launch<Epilogue::f32_add>(p, stream) : launch<Epilogue::f32>(p, stream);
  if (p.sum_dtype == DType::bf16)
    return p.accumulate ? launch<Epilogue::bf16_add>(p, stream) : launch<Epilogue::bf16>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace syncfree
