// The chunk driver of the fused linear cross-entropy, the same for CPU and CUDA: Backend supplies the kernels.
//
// A chunk of rows is gathered, multiplied into logits, turned into losses and (in place) into the gradient of the
// logits, and that into its shares of dX, dW and db. Shapes are fixed by the host; how many rows are live is read on
// the device.
#pragma once

#include <tuple>

#include "gemm.h"
#include "loss_inputs.h"

namespace syncfree {

struct FlceNeeds {
  bool dx, dw, db;
  bool any() const { return dx || dw || db; }
};

struct FlceGradients {
  Tensor dx, dw, db, dx_scale, dw_scale;
};

struct FlceProblem {
  ScalarType compute;
  Tensor input, weight;  // rows contiguous; weight in the compute dtype
  ScalarType weight_leaf;
  OptionalTensor bias;  // acc
  int64_t hidden;
  int64_t chunk_rows, workspace_bytes;
  bool lean;

  FlceProblem(const char* op, const Tensor& x, const Tensor& w, const OptionalTensor& linear_bias,
              std::optional<ScalarType> compute_dtype, std::optional<int64_t> chunk_rows,
              std::optional<int64_t> workspace_bytes, bool lean)
      : compute(compute_dtype.value_or(x.scalar_type())), weight_leaf(w.scalar_type()), lean(lean) {
    SF_CHECK(x.dim() == 2, op, ": input must be 2-D (rows, hidden), got shape ", shape_of(x));
    SF_CHECK(w.dim() == 2 && w.size(1) == x.size(1), op, ": linear_weight must have shape (classes, ", x.size(1),
             "), got ", shape_of(w));
    SF_CHECK(w.size(0) >= 1 && w.size(1) >= 1, op, ": linear_weight must not be empty, got shape ", shape_of(w));
    check_floating(op, "input", x);
    check_floating(op, "linear_weight", w);
    check_same_device(op, "linear_weight", w, x);
    SF_CHECK(is_floating(compute), op, ": compute_dtype must be floating, got ", name_of(compute));
    SF_CHECK(compute_dtype || x.scalar_type() == w.scalar_type(), op, ": linear_weight must have the dtype of input, ",
             name_of(x.scalar_type()), ", got ", name_of(w.scalar_type()));
    SF_CHECK(!chunk_rows || *chunk_rows >= 1, op, ": chunk_rows must be >= 1, got ", chunk_rows.value_or(0));
    SF_CHECK(!workspace_bytes || *workspace_bytes >= 1, op, ": workspace_bytes must be >= 1, got ",
             workspace_bytes.value_or(0));
    this->chunk_rows = chunk_rows.value_or(0);
    this->workspace_bytes = workspace_bytes.value_or(0);
    hidden = x.size(1);
    input = with_contiguous_rows(x);
    weight = with_contiguous_rows(w.scalar_type() == compute ? w : converted(w, compute));
    if (linear_bias) {
      check_floating(op, "linear_bias", *linear_bias);
      check_same_device(op, "linear_bias", *linear_bias, x);
      SF_CHECK(linear_bias->dim() == 1 && linear_bias->size(0) == w.size(0), op, ": linear_bias must have shape (",
               w.size(0), ",), got ", shape_of(*linear_bias));
      bias = flat(*linear_bias, acc_type(compute));
    }
  }
};

// final_gradients: float16 comes without the power of two of each row (the upstream gradient is in it already).
// A backend with kernels of its own for a problem takes it whole: Backend::fuses says so.
template <class Backend>
FlceGradients run_chunks(Backend& backend, const FlceProblem& problem, const LossInputs& in, const Counts& counts,
                         const Upstream& upstream, const LossOutputs* outputs, FlceNeeds need, bool final_gradients) {
  if constexpr (Backend::kHasFused)
    if (backend.fuses(problem, in)) return backend.run_fused(problem, in, counts, upstream, outputs, need);
  const ScalarType acc = in.acc;
  const DType acc_d = dtype_of(acc), compute_d = dtype_of(problem.compute);
  const int64_t rows = in.rows, classes = in.num_classes, hidden = problem.hidden;
  const Tensor& x = problem.input;
  const bool half = problem.compute == ScalarType::Half;
  const bool scale_dx = need.dx && x.scalar_type() == ScalarType::Half && !final_gradients;
  const bool scale_dw = need.dw && problem.weight_leaf == ScalarType::Half && !final_gradients;
  FlceGradients out{
      need.dx ? new_empty(x, {rows, hidden}, x.scalar_type()) : new_empty(x, {0}, x.scalar_type()),
      need.dw ? new_empty(x, {classes, hidden}, problem.weight_leaf) : new_empty(x, {0}, problem.weight_leaf),
      new_empty(x, {need.db ? classes : 0}, acc),
      new_empty(x, {scale_dx ? rows : 0}, ScalarType::Float),
      new_empty(x, {scale_dw ? classes : 0}, ScalarType::Float),
  };
  const int64_t pitch = logits_pitch(classes, size_of(acc_d));
  const ChunkPlan plan = plan_chunks(rows, pitch * size_of(acc_d), problem.chunk_rows, problem.workspace_bytes,
                                     Backend::kDefaultWorkspace, Backend::kMinRows, Backend::kRowMultiple);
  if (plan.count == 0) {
    if (need.dw) torch::stable::zero_(out.dw);
    if (need.db) torch::stable::zero_(out.db);
    if (scale_dw) torch::stable::fill_(out.dw_scale, 1.0);
    return out;
  }

  // dW is added up in the output itself where that is as exact as a wider accumulator, or asked for (lean).
  const bool dw_in_place = problem.weight_leaf == acc ||
                           (problem.weight_leaf == problem.compute && !half && (plan.count == 1 || problem.lean));
  Tensor logits = new_empty(x, {plan.rows, pitch}, acc);
  Tensor gathered = new_empty(x, {plan.rows, hidden}, problem.compute);
  Tensor product = new_empty(x, {need.dx ? plan.rows : 0, hidden}, acc);
  Tensor dw_sum = need.dw && !dw_in_place ? new_empty(x, {classes, hidden}, acc) : out.dw;
  Tensor column_scratch = new_bytes(x, need.db ? Backend::column_sum_scratch_bytes(classes) : 0);
  Tensor alpha = new_empty(x, {3}, acc);
  // What rounding takes from a row of g would reach dX times the mean row of the weight.
  const bool rounds = need.dx && problem.compute != acc;
  Tensor residue = new_empty(x, {rounds ? plan.rows : 0}, acc);
  if (need.any()) {
    AlphaParams p{static_cast<const double*>(counts.counts.const_data_ptr()),
                  in.options,
                  upstream.scalar,
                  half,
                  acc_d,
                  alpha.mutable_data_ptr()};
    backend.alpha(p);
  }
  const int64_t g_pitch = pitch * size_of(acc_d) / size_of(compute_d);

  for (int64_t i = 0; i < plan.count; ++i) {
    const int64_t first = i * plan.rows, size = std::min(plan.rows, rows - first);
    const Chunk chunk = counts.chunk(first, size);
    const int64_t product_rows = backend.product_rows(chunk);  // all of them, where the host cannot know better
    backend.gather(GatherParams{chunk, x.const_data_ptr(), dtype_of(x.scalar_type()), pitch_of(x), hidden,
                                gathered.mutable_data_ptr(), compute_d, hidden});

    GemmParams gemm{};
    gemm.ab_dtype = compute_d;
    gemm.acc = acc_d;
    gemm.m = product_rows, gemm.n = classes, gemm.k = hidden;
    gemm.a = gathered.const_data_ptr(), gemm.lda = hidden;
    gemm.b = problem.weight.const_data_ptr(), gemm.ldb = pitch_of(problem.weight), gemm.transpose_b = true;
    gemm.c = logits.mutable_data_ptr(), gemm.ldc = pitch, gemm.c_dtype = acc_d;
    gemm.parts = compute_d == DType::f32 && hidden >= 512 ? 4 : 1;
    backend.gemm(gemm);
    gemm.parts = 1;

    RowParams row = row_params(in, upstream);
    row.chunk = chunk;
    row.logits = logits.const_data_ptr(), row.logits_dtype = acc_d, row.logits_pitch = pitch;
    row.bias = data_or_null(problem.bias);
    if (outputs) outputs->attach(row);
    if (need.any()) row.grad = logits.mutable_data_ptr(), row.grad_dtype = compute_d, row.grad_pitch = g_pitch;
    if (rounds) row.residue = residue.mutable_data_ptr();
    backend.rows(row);

    if (need.dx) {
      gemm.m = product_rows, gemm.n = hidden, gemm.k = classes;
      gemm.a = logits.const_data_ptr(), gemm.lda = g_pitch;
      gemm.b = problem.weight.const_data_ptr(), gemm.ldb = pitch_of(problem.weight), gemm.transpose_b = false;
      gemm.c = product.mutable_data_ptr(), gemm.ldc = hidden, gemm.c_dtype = acc_d;
      backend.gemm(gemm);
      if (rounds)
        backend.add_targets(AddTargetsParams{chunk, in.targets(), in.shift, 0, classes, residue.const_data_ptr(), acc_d,
                                             problem.weight.const_data_ptr(), compute_d, pitch_of(problem.weight),
                                             hidden, product.mutable_data_ptr(), hidden});
      backend.store_rows(StoreRowsParams{chunk, product.const_data_ptr(), hidden, hidden, alpha.const_data_ptr(), acc_d,
                                         out.dx.mutable_data_ptr(), dtype_of(x.scalar_type()), hidden,
                                         scale_dx ? static_cast<float*>(out.dx_scale.mutable_data_ptr()) : nullptr});
    }
    if (need.dw) {
      gemm.m = classes, gemm.n = hidden, gemm.k = product_rows;
      gemm.a = logits.const_data_ptr(), gemm.lda = g_pitch, gemm.transpose_a = true;
      gemm.b = gathered.const_data_ptr(), gemm.ldb = hidden, gemm.transpose_b = false;
      gemm.c = dw_sum.mutable_data_ptr(), gemm.ldc = hidden, gemm.c_dtype = dtype_of(dw_sum.scalar_type());
      gemm.accumulate = i > 0;
      gemm.alpha = alpha.const_data_ptr();
      backend.gemm(gemm);
    }
    if (need.db)
      backend.column_sum(ColumnSumParams{chunk, logits.const_data_ptr(), compute_d, g_pitch, classes, i > 0, acc_d,
                                         out.db.mutable_data_ptr(), column_scratch.mutable_data_ptr()});
  }

  if (need.dw && !dw_in_place)
    backend.cast_rows(CastRowsParams{dw_sum.const_data_ptr(), classes, hidden, nullptr, acc_d,
                                     out.dw.mutable_data_ptr(), dtype_of(problem.weight_leaf),
                                     scale_dw ? static_cast<float*>(out.dw_scale.mutable_data_ptr()) : nullptr});
  if (need.db)
    backend.cast_rows(CastRowsParams{out.db.const_data_ptr(), 1, classes, alpha.const_data_ptr(), acc_d,
                                     out.db.mutable_data_ptr(), acc_d, nullptr});
  return out;
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> flce_forward(
    Tensor input, Tensor linear_weight, Tensor target, OptionalTensor linear_bias, SF_OPTION_PARAMETERS,
    std::optional<int64_t> chunk_rows, std::optional<int64_t> workspace_bytes, bool lean,
    std::optional<ScalarType> compute_dtype, bool need_dx, bool need_dw, bool need_db, bool need_token_accuracy,
    bool need_predicted_tokens, bool need_logsumexp) {
  constexpr const char* op = "syncfree::flce_forward";
  Backend backend(input);
  const FlceProblem problem(op, input, linear_weight, linear_bias, compute_dtype, chunk_rows, workspace_bytes, lean);
  const LossInputs in(op, input, acc_type(problem.compute), input.size(0), linear_weight.size(0), target,
                      SF_OPTION_ARGUMENTS);
  const FlceNeeds need{need_dx, need_dw, need_db && linear_bias};
  SF_CHECK(!(need.any() && in.is_none()), op,
           ": reduction 'none' has no gradient in forward, got need_dx, need_dw or need_db");
  const Counts counts = count(backend, in, Upstream());
  const LossOutputs outputs(in, input, need_token_accuracy, need_predicted_tokens, need_logsumexp);
  const FlceGradients grads = run_chunks(backend, problem, in, counts, Upstream(), &outputs, need, false);
  outputs.reduce(backend, in, counts);
  return {outputs.loss,
          outputs.z_loss,
          outputs.token_accuracy,
          outputs.predicted_tokens,
          outputs.logsumexp,
          grads.dx,
          grads.dw,
          grads.db,
          grads.dx_scale,
          grads.dw_scale};
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor> flce_backward(Tensor grad_output, Tensor input, Tensor linear_weight, Tensor target,
                                                 OptionalTensor linear_bias, SF_OPTION_PARAMETERS,
                                                 std::optional<int64_t> chunk_rows,
                                                 std::optional<int64_t> workspace_bytes, bool lean,
                                                 std::optional<ScalarType> compute_dtype, bool need_dx, bool need_dw,
                                                 bool need_db) {
  constexpr const char* op = "syncfree::flce_backward";
  Backend backend(input);
  const FlceProblem problem(op, input, linear_weight, linear_bias, compute_dtype, chunk_rows, workspace_bytes, lean);
  const LossInputs in(op, input, acc_type(problem.compute), input.size(0), linear_weight.size(0), target,
                      SF_OPTION_ARGUMENTS);
  const Upstream upstream(in, grad_output, input);
  const Counts counts = count(backend, in, upstream);
  const FlceGradients grads = run_chunks(backend, problem, in, counts, upstream, nullptr,
                                         FlceNeeds{need_dx, need_dw, need_db && linear_bias}, true);
  return {grads.dx, grads.dw, grads.db};
}

}  // namespace syncfree
