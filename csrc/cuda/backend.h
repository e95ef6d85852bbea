// The CUDA kernels as the chunk driver sees them: on the current stream of the tensor's device, nothing read back.
#pragma once

#include <cuda_runtime_api.h>

#include "../common/flce.h"
#include "../common/flce_shard.h"
#include "kernels/launch.h"

namespace syncfree {

class CudaBackend {
 public:
  static constexpr bool kHasFused = true;
  static constexpr int64_t kDefaultWorkspace = int64_t(1) << 30;
  static constexpr int64_t kMinRows = 1024;
  static constexpr int64_t kRowMultiple = 128;
  static int64_t count_scratch_bytes(int64_t rows, int64_t num_classes) {
    return syncfree::count_scratch_bytes(rows, num_classes);
  }
  static int64_t column_sum_scratch_bytes(int64_t columns) { return syncfree::column_sum_scratch_bytes(columns); }

  explicit CudaBackend(const Tensor& like) : CudaBackend(like.get_device_index()) {}
  explicit CudaBackend(int32_t device);
  cudaStream_t stream() const { return stream_; }
  bool is_capturing() const;
  int64_t product_rows(const Chunk& c) const { return c.size; }
  void count(const CountParams& p) { done(launch_count(p, stream_), "count"); }
  void gather(const GatherParams& p) { done(launch_gather(p, stream_), "gather"); }
  void rows(const RowParams& p) { done(launch_rows(p, stream_), "row loss"); }
  void alpha(const AlphaParams& p) { done(launch_alpha(p, stream_), "alpha"); }
  void add_targets(const AddTargetsParams& p) { done(launch_add_targets(p, stream_), "add targets"); }
  void store_rows(const StoreRowsParams& p) { done(launch_store_rows(p, stream_), "store rows"); }
  void cast_rows(const CastRowsParams& p) { done(launch_cast_rows(p, stream_), "cast rows"); }
  void column_sum(const ColumnSumParams& p) { done(launch_column_sum(p, stream_), "column sum"); }
  void reduce(const ReduceParams& p) { done(launch_reduce(p, stream_), "reduce"); }
  void scale(const ScaleParams& p) { done(launch_scale(p, stream_), "scale"); }
  void publish(const PublishParams& p) { done(launch_publish(p, stream_), "publish"); }
  void select(const SelectParams& p) { done(launch_select(p, stream_), "masked indices"); }
  void gemm(const GemmParams& p);

  // The Hopper path (ops/fused.cpp): bfloat16 products on compute capability 9.0, hidden a multiple of 8, and nearly all
  // options; docs/semantics.md has the table.
  bool fuses(const FlceProblem& problem, const LossInputs& in) const;
  FlceGradients run_fused(const FlceProblem& problem, const LossInputs& in, const Counts& counts,
                          const Upstream& upstream, const LossOutputs* outputs, FlceNeeds need);
  int64_t fused_shard_rows(const FusedShardProblem& problem) const;

  static void done(cudaError_t error, const char* kernel);

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

}  // namespace syncfree
