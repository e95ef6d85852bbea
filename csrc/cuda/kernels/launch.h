// Launchers: parameters and a stream in, an error out. No torch, no device code.
#pragma once

#include <cuda_runtime_api.h>

#include "../../common/loop_params.h"
#include "../../common/params.h"

namespace syncfree {

int64_t count_scratch_bytes(int64_t rows, int64_t num_classes);
int64_t column_sum_scratch_bytes(int64_t columns);

cudaError_t launch_count(const CountParams& p, cudaStream_t stream);
cudaError_t launch_gather(const GatherParams& p, cudaStream_t stream);
cudaError_t launch_rows(const RowParams& p, cudaStream_t stream);
cudaError_t launch_alpha(const AlphaParams& p, cudaStream_t stream);
cudaError_t launch_add_targets(const AddTargetsParams& p, cudaStream_t stream);
cudaError_t launch_store_rows(const StoreRowsParams& p, cudaStream_t stream);
cudaError_t launch_cast_rows(const CastRowsParams& p, cudaStream_t stream);
cudaError_t launch_column_sum(const ColumnSumParams& p, cudaStream_t stream);
cudaError_t launch_reduce(const ReduceParams& p, cudaStream_t stream);
cudaError_t launch_scale(const ScaleParams& p, cudaStream_t stream);
cudaError_t launch_publish(const PublishParams& p, cudaStream_t stream);
cudaError_t launch_select(const SelectParams& p, cudaStream_t stream);

}  // namespace syncfree
