// Cross-entropy of logits that the caller owns: the same row kernel, over rows in place, the gradient in fresh memory.
#pragma once

#include <tuple>

#include "loss_inputs.h"

namespace syncfree {

inline void check_logits(const char* op, const Tensor& logits) {
  SF_CHECK(logits.dim() == 2, op, ": logits must be 2-D (rows, classes), got shape ", shape_of(logits));
  check_floating(op, "logits", logits);
}

inline void attach_logits(RowParams& p, const Counts& counts, const Tensor& logits, const Tensor& row_stats) {
  p.chunk = counts.chunk(0, logits.size(0));
  p.logits = logits.const_data_ptr();
  p.logits_dtype = dtype_of(logits.scalar_type());
  p.logits_pitch = pitch_of(logits);
  p.by_row_index = true;
  p.row_stats = row_stats.mutable_data_ptr();
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> cross_entropy_forward(Tensor logits, Tensor target,
                                                                                 SF_OPTION_PARAMETERS,
                                                                                 bool need_token_accuracy,
                                                                                 bool need_predicted_tokens,
                                                                                 bool need_logsumexp) {
  constexpr const char* op = "syncfree::cross_entropy_forward";
  check_logits(op, logits);
  Backend backend(logits);
  const Tensor z = with_contiguous_rows(logits);
  const LossInputs in(op, logits, acc_type(logits.scalar_type()), logits.size(0), logits.size(1), target,
                      SF_OPTION_ARGUMENTS);
  const Counts counts = count(backend, in, Upstream());
  const LossOutputs outputs(in, logits, need_token_accuracy, need_predicted_tokens, need_logsumexp);
  const Tensor row_stats = new_empty(logits, {in.rows, 4}, in.acc);
  RowParams p = row_params(in, Upstream());
  attach_logits(p, counts, z, row_stats);
  outputs.attach(p);
  if (in.rows) backend.rows(p);
  outputs.reduce(backend, in, counts);
  return {outputs.loss, outputs.z_loss, outputs.token_accuracy, outputs.predicted_tokens, outputs.logsumexp, row_stats};
}

template <class Backend>
Tensor cross_entropy_backward(Tensor grad_output, Tensor logits, Tensor target, Tensor row_stats,
                              SF_OPTION_PARAMETERS) {
  constexpr const char* op = "syncfree::cross_entropy_backward";
  check_logits(op, logits);
  Backend backend(logits);
  const Tensor z = with_contiguous_rows(logits);
  const LossInputs in(op, logits, acc_type(logits.scalar_type()), logits.size(0), logits.size(1), target,
                      SF_OPTION_ARGUMENTS);
  SF_CHECK(row_stats.dim() == 2 && row_stats.size(0) == in.rows && row_stats.size(1) == 4 &&
               row_stats.is_contiguous() && row_stats.scalar_type() == in.acc,
           op, ": row_stats must be what cross_entropy_forward gave, (", in.rows, ", 4) of ", name_of(in.acc), ", got ",
           shape_of(row_stats), " of ", name_of(row_stats.scalar_type()));
  check_same_device(op, "row_stats", row_stats, logits);
  const Upstream upstream(in, grad_output, logits);
  const Counts counts = count(backend, in, upstream);
  const Tensor grad = new_empty(logits, {in.rows, in.num_classes}, logits.scalar_type());
  RowParams p = row_params(in, upstream);
  attach_logits(p, counts, z, row_stats);
  p.read_stats = true;
  p.grad = grad.mutable_data_ptr(), p.grad_dtype = p.logits_dtype, p.grad_pitch = in.num_classes;
  p.divide = true;
  p.upstream_scalar = upstream.scalar;
  if (in.rows) backend.rows(p);
  return grad;
}

}  // namespace syncfree
