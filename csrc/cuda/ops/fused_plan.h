// What the Hopper path takes, and in what chunks: the same for all classes (fused.cpp) and for a slice of them
// (fused_shard.cpp).
#pragma once

#include "../backend.h"
#include "../kernels/fused.h"

namespace syncfree {

// Rounding a sum to 24 bits once a chunk: the errors add up like a random walk, to sqrt(chunks) / 256 of the one rounding
// of the result at most.
constexpr int64_t kMaxSplitChunks = 4096;

// Room beside what fused_plan allows. A mask that keeps each of 8192 rows with a chance of a half keeps 45 rows more or
// fewer than a half (one standard deviation). Those more should not take one more chunk, which reads and writes dW once
// more. Not where memory comes first: with lean sums, or with a size that is asked for.
constexpr int64_t kSpareRows = 64;

// Of E, in elements.
inline int64_t fused_pitch(int64_t classes) {
  return round_up(classes, 64);
}

// bfloat16 products of what can be read, and written, as it is.
inline bool fuses_dtypes(ScalarType compute, ScalarType input, ScalarType weight_leaf) {
  const auto wide = [](ScalarType type) { return type == ScalarType::BFloat16 || type == ScalarType::Float; };
  return compute == ScalarType::BFloat16 && wide(input) && wide(weight_leaf);
}

// Of softcaps, 0 being none. The capped logits are as exact as kernels/softcap.cuh makes them, absolutely.
constexpr double kLeastSoftcap = 1e-6, kMostSoftcap = 100;
inline bool fuses_softcap(double softcap) {
  return softcap == 0 || (softcap >= kLeastSoftcap && softcap <= kMostSoftcap);
}

// Rows that the kernels can read 16 bytes at a time.
inline bool has_aligned_rows(const Tensor& t) {
  return pitch_of(t) * int64_t(t.element_size()) % 16 == 0 &&
         (reinterpret_cast<uintptr_t>(t.const_data_ptr()) & 15) == 0;
}

// E takes no more than the default workspace (lean: half of it), and no more than dW where 2048 rows (lean: 1280) do not
// need more.
// Of the sizes from there to half of it, the one that keeps the multiprocessors busiest. beside_dw: as fused_cost has it.
inline ChunkPlan fused_plan(int64_t rows, int64_t classes, int64_t hidden, int64_t chunk_rows, int64_t workspace_bytes,
                            bool lean, bool beside_dw) {
  const int64_t row_bytes = fused_pitch(classes) * 2;
  if (chunk_rows) return plan_chunks(rows, row_bytes, chunk_rows, 0, 0, 1, CudaBackend::kRowMultiple);
  const auto plan_for = [&](int64_t workspace, int64_t least) {
    return plan_chunks(rows, row_bytes, 0, 0, workspace, least, kRowGroup);
  };
  const int64_t most = std::max<int64_t>(hidden, lean ? 1280 : 2048) * row_bytes,
                budget = CudaBackend::kDefaultWorkspace / (lean ? 2 : 1);
  ChunkPlan best =
      workspace_bytes ? plan_for(workspace_bytes, 1) : plan_for(std::min(budget, most), CudaBackend::kMinRows);
  const auto cost = [&](const ChunkPlan& p) { return fused_cost(rows, p.rows, classes, hidden, beside_dw); };
  const int64_t least = best.rows / 2;
  for (int64_t size = best.rows - kRowGroup; size >= least && size >= kRowGroup; size -= kRowGroup) {
    const ChunkPlan other = plan_for(size * row_bytes, 1);
    if (cost(other) < cost(best)) best = other;
  }
  return best;
}

}  // namespace syncfree
