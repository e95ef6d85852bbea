// The Hopper path over a slice of the classes: ops that exist for CUDA alone. csrc/schemas.cpp says what they take.
#pragma once

#include <tuple>

#include "../../common/flce_shard.h"

namespace syncfree {

std::tuple<Tensor, Tensor, Tensor, Tensor> flce_shard_fused_begin(Tensor input, Tensor linear_weight, Tensor target,
                                                                  Tensor counts, Tensor rows, int64_t first_class,
                                                                  int64_t num_classes, int64_t chunk_rows,
                                                                  ScalarType weight_dtype, int64_t shift, bool lean,
                                                                  bool need_dw);

std::tuple<Tensor, Tensor, Tensor> flce_shard_fused_logits(Tensor input, Tensor linear_weight, Tensor target,
                                                           Tensor counts, Tensor rows, Tensor target_logits,
                                                           int64_t first_class, int64_t num_classes, int64_t first_row,
                                                           int64_t chunk_rows, SF_OPTION_PARAMETERS, bool need_e,
                                                           OptionalTensor predicted_tokens, OptionalTensor largest);

std::tuple<Tensor, Tensor> flce_shard_fused_gradient(Tensor e, Tensor slice_stats, Tensor row_stats,
                                                     Tensor linear_weight, Tensor target, Tensor counts, Tensor rows,
                                                     Tensor target_gradients, Tensor ce, Tensor z,
                                                     OptionalTensor logsumexp, int64_t first_class, int64_t num_classes,
                                                     int64_t first_row, SF_OPTION_PARAMETERS, bool need_dx);

void flce_shard_fused_weight_gradient(Tensor e, Tensor gathered, Tensor v, Tensor counts, Tensor rows,
                                      Tensor class_rows, Tensor dw, Tensor dw_low, int64_t first_row, bool accumulate);

void flce_shard_fused_add_targets(Tensor input, Tensor counts, Tensor rows, Tensor class_rows, Tensor target_gradients,
                                  Tensor dw, Tensor dw_low, OptionalTensor out);

void flce_shard_fused_store_dx(Tensor dx_sum, Tensor counts, Tensor rows, Tensor dx, int64_t first_row);

}  // namespace syncfree
