// The CPU's kernels as the chunk driver sees them. Host memory is read freely here: there is nothing to wait for.
#pragma once

#include <algorithm>

#include "../common/gemm.h"
#include "../common/loop_params.h"
#include "../common/tensor.h"

namespace syncfree {

void count_cpu(const CountParams& p);
void gather_cpu(const GatherParams& p);
void rows_cpu(const RowParams& p);
void alpha_cpu(const AlphaParams& p);
void add_targets_cpu(const AddTargetsParams& p);
void store_rows_cpu(const StoreRowsParams& p);
void cast_rows_cpu(const CastRowsParams& p);
void column_sum_cpu(const ColumnSumParams& p);
void reduce_cpu(const ReduceParams& p);
void scale_cpu(const ScaleParams& p);
void gemm_cpu(const GemmParams& p);
void publish_cpu(const PublishParams& p);
void select_cpu(const SelectParams& p);

struct CpuBackend {
  static constexpr bool kHasFused = false;
  static constexpr int64_t kDefaultWorkspace = int64_t(64) << 20;  // larger and smaller chunks measured within noise
  static constexpr int64_t kMinRows = 512;
  static constexpr int64_t kRowMultiple = 1;
  static constexpr int64_t count_scratch_bytes(int64_t, int64_t) { return 0; }
  static constexpr int64_t column_sum_scratch_bytes(int64_t) { return 0; }

  explicit CpuBackend(const Tensor&) {}
  explicit CpuBackend(int32_t) {}  // a device index, as that of CUDA
  int64_t product_rows(const Chunk& c) const {
    return std::clamp<int64_t>(int64_t(c.counts[kCountRows]) - c.first, 0, c.size);
  }
  void count(const CountParams& p) { count_cpu(p); }
  void gather(const GatherParams& p) { gather_cpu(p); }
  void rows(const RowParams& p) { rows_cpu(p); }
  void alpha(const AlphaParams& p) { alpha_cpu(p); }
  void add_targets(const AddTargetsParams& p) { add_targets_cpu(p); }
  void store_rows(const StoreRowsParams& p) { store_rows_cpu(p); }
  void cast_rows(const CastRowsParams& p) { cast_rows_cpu(p); }
  void column_sum(const ColumnSumParams& p) { column_sum_cpu(p); }
  void reduce(const ReduceParams& p) { reduce_cpu(p); }
  void scale(const ScaleParams& p) { scale_cpu(p); }
  void gemm(const GemmParams& p) { gemm_cpu(p); }
  void publish(const PublishParams& p) { publish_cpu(p); }
  void select(const SelectParams& p) { select_cpu(p); }
};

}  // namespace syncfree
