// The fused linear cross-entropy over one slice of the classes, for heads whose vocabulary is spread over devices.
//
// A chunk of rows takes four calls: the logits of the slice with its statistics; the gradient of the logits with the
// slice's share of dX, once the caller has combined the statistics of all slices; its share of dW and db; and dX, once
// the caller has added up the shares. The kernels are those of flce.h. What is exchanged between the calls is the
// caller's business (syncfree_ext/integrations/_vocab_parallel.py). A slice may be empty.
#pragma once

#include <tuple>

#include "gemm.h"
#include "loss_inputs.h"

namespace syncfree {

inline void check_counts(const char* op, const Tensor& counts, const Tensor& rows, const Tensor& like) {
  check_same_device(op, "counts", counts, like);
  check_same_device(op, "rows", rows, like);
  SF_CHECK(counts.scalar_type() == ScalarType::Double && counts.is_contiguous() && counts.numel() == kCountSlots, op,
           ": counts must be what count_targets gave, (", int64_t(kCountSlots), ",) of float64, got ", shape_of(counts),
           " of ", name_of(counts.scalar_type()));
  SF_CHECK(rows.scalar_type() == ScalarType::Int && rows.is_contiguous() && rows.dim() == 1, op,
           ": rows must be what count_targets gave, one dimension of int32, got ", shape_of(rows), " of ",
           name_of(rows.scalar_type()));
}

// A chunk as the caller names it: counts and rows of count_targets, and the place of the chunk among the rows.
inline Chunk shard_chunk(const char* op, const Tensor& counts, const Tensor& rows, const Tensor& like,
                         int64_t first_row, int64_t size) {
  check_counts(op, counts, rows, like);
  SF_CHECK(first_row >= 0 && size >= 1 && size <= rows.numel() && first_row <= rows.numel() - size, op,
           ": a chunk must lie within the ", rows.numel(), " rows, got ", size, " from ", first_row);
  return {static_cast<const double*>(counts.const_data_ptr()), static_cast<const int32_t*>(rows.const_data_ptr()),
          first_row, size};
}

inline void check_contiguous(const char* op, const char* name, const Tensor& t, ScalarType type, const Tensor& like) {
  check_same_device(op, name, t, like);
  SF_CHECK(t.is_contiguous() && t.scalar_type() == type, op, ": ", name, " must be contiguous ", name_of(type),
           ", got ", shape_of(t), " of ", name_of(t.scalar_type()));
}

inline void check_vector(const char* op, const char* name, const Tensor& t, ScalarType type, int64_t size,
                         const Tensor& like) {
  check_contiguous(op, name, t, type, like);
  SF_CHECK(t.dim() == 1 && t.size(0) == size, op, ": ", name, " must have shape (", size, ",), got ", shape_of(t));
}

inline void check_matrix(const char* op, const char* name, const Tensor& t, ScalarType type, int64_t rows,
                         int64_t columns, const Tensor& like) {
  check_contiguous(op, name, t, type, like);
  SF_CHECK(t.dim() == 2 && t.size(0) == rows && t.size(1) == columns, op, ": ", name, " must have shape (", rows, ", ",
           columns, "), got ", shape_of(t));
}

// The slice [first_class, first_class + classes) of num_classes.
struct Shard {
  ScalarType compute, acc;
  Tensor weight;  // rows contiguous
  OptionalTensor bias;
  int64_t classes, hidden, first_class, num_classes, pitch, gradient_pitch;

  Shard(const char* op, const Tensor& w, const OptionalTensor& linear_bias, int64_t first_class, int64_t num_classes)
      : compute(w.scalar_type()), acc(acc_type(compute)), first_class(first_class), num_classes(num_classes) {
    check_floating(op, "linear_weight", w);
    SF_CHECK(w.dim() == 2 && w.size(1) >= 1, op, ": linear_weight must be 2-D (classes, hidden), got shape ",
             shape_of(w));
    classes = w.size(0), hidden = w.size(1);
    SF_CHECK(first_class >= 0 && classes <= num_classes && first_class <= num_classes - classes, op,
             ": the slice must lie within the ", num_classes, " classes, got ", classes, " from ", first_class);
    weight = with_contiguous_rows(w);
    if (linear_bias) {
      check_floating(op, "linear_bias", *linear_bias);
      check_same_device(op, "linear_bias", *linear_bias, w);
      SF_CHECK(linear_bias->dim() == 1 && linear_bias->size(0) == classes, op, ": linear_bias must have shape (",
               classes, ",), got ", shape_of(*linear_bias));
      bias = flat(*linear_bias, acc);
    }
    pitch = logits_pitch(classes, size_of(dtype_of(acc)));
    gradient_pitch = pitch * size_of(dtype_of(acc)) / size_of(dtype_of(compute));
  }

  RowParams row_params(const LossInputs& in, const Chunk& chunk, const Tensor& logits, const Tensor& row_stats) const {
    RowParams p = syncfree::row_params(in, Upstream());
    p.chunk = chunk;
    p.num_classes = classes;
    p.first_class = first_class;
    p.logits = logits.const_data_ptr(), p.logits_dtype = dtype_of(acc), p.logits_pitch = pitch;
    p.bias = data_or_null(bias);
    p.row_stats = row_stats.mutable_data_ptr();
    return p;
  }
};

// What decides whether a backend's own kernels take a slice.
struct FusedShardProblem {
  ScalarType compute, input, weight_leaf;
  int64_t rows, hidden, largest_slice;
  bool biased;
  double label_smoothing, softcap;
  int64_t chunk_rows, workspace_bytes;
  bool lean;
};

template <class Backend>
std::tuple<Tensor, Tensor, Tensor> flce_shard_logits(Tensor input, Tensor linear_weight, Tensor target, Tensor counts,
                                                     Tensor rows, OptionalTensor linear_bias, int64_t first_class,
                                                     int64_t num_classes, int64_t first_row, int64_t chunk_rows,
                                                     SF_OPTION_PARAMETERS, OptionalTensor predicted_tokens) {
  constexpr const char* op = "syncfree::flce_shard_logits";
  SF_CHECK(input.dim() == 2, op, ": input must be 2-D (rows, hidden), got shape ", shape_of(input));
  check_floating(op, "input", input);
  Backend backend(input);
  const Shard shard(op, linear_weight, linear_bias, first_class, num_classes);
  check_same_device(op, "linear_weight", linear_weight, input);
  SF_CHECK(input.size(1) == shard.hidden, op, ": linear_weight must have shape (classes, ", input.size(1), "), got ",
           shape_of(linear_weight));
  const LossInputs in(op, input, shard.acc, input.size(0), num_classes, target, SF_OPTION_ARGUMENTS);
  const Chunk chunk = shard_chunk(op, counts, rows, input, first_row, chunk_rows);
  SF_CHECK(rows.numel() == in.rows, op, ": rows must have one entry for each of ", in.rows, " rows, got shape ",
           shape_of(rows));
  if (predicted_tokens) check_vector(op, "predicted_tokens", *predicted_tokens, ScalarType::Long, in.rows, input);
  const DType acc = dtype_of(shard.acc), compute = dtype_of(shard.compute);
  const Tensor x = with_contiguous_rows(input);
  Tensor gathered = new_empty(input, {chunk.size, shard.hidden}, shard.compute);
  Tensor logits = new_empty(input, {chunk.size, shard.pitch}, shard.acc);
  Tensor row_stats = new_empty(input, {chunk.size, 4}, shard.acc);

  backend.gather(GatherParams{chunk, x.const_data_ptr(), dtype_of(x.scalar_type()), pitch_of(x), shard.hidden,
                              gathered.mutable_data_ptr(), compute, shard.hidden});
  if (shard.classes) {
    GemmParams gemm{};
    gemm.ab_dtype = compute, gemm.acc = acc;
    gemm.m = backend.product_rows(chunk), gemm.n = shard.classes, gemm.k = shard.hidden;
    gemm.a = gathered.const_data_ptr(), gemm.lda = shard.hidden;
    gemm.b = shard.weight.const_data_ptr(), gemm.ldb = pitch_of(shard.weight), gemm.transpose_b = true;
    gemm.c = logits.mutable_data_ptr(), gemm.ldc = shard.pitch, gemm.c_dtype = acc;
    gemm.parts = compute == DType::f32 && shard.hidden >= 512 ? 4 : 1;
    backend.gemm(gemm);
  }
  RowParams row = shard.row_params(in, chunk, logits, row_stats);
  row.predicted = predicted_tokens ? static_cast<int64_t*>(predicted_tokens->mutable_data_ptr()) : nullptr;
  backend.rows(row);
  return {gathered, logits, row_stats};
}

template <class Backend>
std::tuple<Tensor, Tensor> flce_shard_gradient(Tensor logits, Tensor row_stats, Tensor linear_weight, Tensor target,
                                               Tensor counts, Tensor rows, Tensor ce, Tensor z,
                                               OptionalTensor logsumexp, OptionalTensor linear_bias,
                                               int64_t first_class, int64_t num_classes, int64_t first_row,
                                               SF_OPTION_PARAMETERS, bool need_gradient, bool need_dx) {
  constexpr const char* op = "syncfree::flce_shard_gradient";
  Backend backend(logits);
  const Shard shard(op, linear_weight, linear_bias, first_class, num_classes);
  check_same_device(op, "linear_weight", linear_weight, logits);
  const LossInputs in(op, logits, shard.acc, rows.numel(), num_classes, target, SF_OPTION_ARGUMENTS);
  SF_CHECK(logits.dim() == 2, op, ": logits must be 2-D (chunk_rows, pitch), got shape ", shape_of(logits));
  const Chunk chunk = shard_chunk(op, counts, rows, logits, first_row, logits.size(0));
  check_matrix(op, "logits", logits, shard.acc, chunk.size, shard.pitch, logits);
  check_matrix(op, "row_stats", row_stats, shard.acc, chunk.size, 4, logits);
  check_vector(op, "ce", ce, shard.acc, in.rows, logits);
  check_vector(op, "z", z, shard.acc, in.rows, logits);
  if (logsumexp) check_vector(op, "logsumexp", *logsumexp, shard.acc, in.rows, logits);
  const DType acc = dtype_of(shard.acc), compute = dtype_of(shard.compute);

  RowParams row = shard.row_params(in, chunk, logits, row_stats);
  row.read_stats = true;
  row.ce = ce.mutable_data_ptr(), row.z = z.mutable_data_ptr();
  row.logsumexp = logsumexp ? logsumexp->mutable_data_ptr() : nullptr;
  if (need_gradient)
    row.grad = logits.mutable_data_ptr(), row.grad_dtype = compute, row.grad_pitch = shard.gradient_pitch;
  const bool product = need_gradient && need_dx;
  const bool rounds = product && shard.classes && shard.compute != shard.acc;
  Tensor residue = new_empty(logits, {rounds ? chunk.size : 0}, shard.acc);
  if (rounds) row.residue = residue.mutable_data_ptr();
  backend.rows(row);

  Tensor alpha = new_empty(logits, {need_gradient ? 3 : 0}, shard.acc);
  if (need_gradient)
    backend.alpha(AlphaParams{chunk.counts, in.options, nullptr, shard.compute == ScalarType::Half, acc,
                              alpha.mutable_data_ptr()});
  Tensor dx = new_empty(logits, {product ? chunk.size : 0, shard.hidden}, shard.acc);
  if (product) {
    const int64_t product_rows = backend.product_rows(chunk);
    if (shard.classes == 0 || product_rows < chunk.size) torch::stable::zero_(dx);
    if (shard.classes) {
      GemmParams gemm{};
      gemm.ab_dtype = compute, gemm.acc = acc;
      gemm.m = product_rows, gemm.n = shard.hidden, gemm.k = shard.classes;
      gemm.a = logits.const_data_ptr(), gemm.lda = shard.gradient_pitch;
      gemm.b = shard.weight.const_data_ptr(), gemm.ldb = pitch_of(shard.weight);
      gemm.c = dx.mutable_data_ptr(), gemm.ldc = shard.hidden, gemm.c_dtype = acc;
      gemm.parts = 1;
      backend.gemm(gemm);
    }
    if (rounds)
      backend.add_targets(AddTargetsParams{chunk, in.targets(), in.shift, first_class, shard.classes,
                                           residue.const_data_ptr(), acc, shard.weight.const_data_ptr(), compute,
                                           pitch_of(shard.weight), shard.hidden, dx.mutable_data_ptr(), shard.hidden});
  }
  return {dx, alpha};
}

template <class Backend>
void flce_shard_weight_gradient(Tensor logits, Tensor gathered, Tensor counts, Tensor rows, Tensor alpha,
                                OptionalTensor dw, OptionalTensor db, int64_t first_row, bool accumulate) {
  constexpr const char* op = "syncfree::flce_shard_weight_gradient";
  SF_CHECK(gathered.dim() == 2 && gathered.is_contiguous(), op, ": gathered must be contiguous (chunk_rows, hidden)");
  check_floating(op, "gathered", gathered);
  Backend backend(gathered);
  const ScalarType compute = gathered.scalar_type(), acc = acc_type(compute);
  const Chunk chunk = shard_chunk(op, counts, rows, gathered, first_row, gathered.size(0));
  const int64_t hidden = gathered.size(1), classes = dw ? dw->size(0) : db ? db->size(0) : 0;
  const int64_t pitch = logits_pitch(classes, size_of(dtype_of(acc))),
                gradient_pitch = pitch * size_of(dtype_of(acc)) / size_of(dtype_of(compute));
  check_vector(op, "alpha", alpha, acc, 3, gathered);
  if (!classes) return;
  check_matrix(op, "logits", logits, acc, chunk.size, pitch, gathered);
  if (dw) {
    SF_CHECK(dw->scalar_type() == acc || dw->scalar_type() == compute, op, ": dw must be ", name_of(acc), " or ",
             name_of(compute), ", got ", name_of(dw->scalar_type()));
    check_matrix(op, "dw", *dw, dw->scalar_type(), classes, hidden, gathered);
    GemmParams gemm{};
    gemm.ab_dtype = dtype_of(compute), gemm.acc = dtype_of(acc);
    gemm.m = classes, gemm.n = hidden, gemm.k = backend.product_rows(chunk);
    gemm.a = logits.const_data_ptr(), gemm.lda = gradient_pitch, gemm.transpose_a = true;
    gemm.b = gathered.const_data_ptr(), gemm.ldb = hidden;
    gemm.c = dw->mutable_data_ptr(), gemm.ldc = hidden, gemm.c_dtype = dtype_of(dw->scalar_type());
    gemm.accumulate = accumulate;
    gemm.alpha = alpha.const_data_ptr();
    gemm.parts = 1;
    backend.gemm(gemm);
  }
  if (db) {
    check_vector(op, "db", *db, acc, classes, gathered);
    Tensor scratch = new_bytes(gathered, Backend::column_sum_scratch_bytes(classes));
    backend.column_sum(ColumnSumParams{chunk, logits.const_data_ptr(), dtype_of(compute), gradient_pitch, classes,
                                       accumulate, dtype_of(acc), db->mutable_data_ptr(), scratch.mutable_data_ptr()});
  }
}

template <class Backend>
void flce_shard_store_dx(Tensor dx_sum, Tensor counts, Tensor rows, Tensor alpha, Tensor dx, OptionalTensor dx_scale,
                         int64_t first_row) {
  constexpr const char* op = "syncfree::flce_shard_store_dx";
  SF_CHECK(dx_sum.dim() == 2, op, ": dx_sum must be 2-D (chunk_rows, hidden), got shape ", shape_of(dx_sum));
  SF_CHECK(dx_sum.scalar_type() == ScalarType::Float || dx_sum.scalar_type() == ScalarType::Double, op,
           ": dx_sum must be float32 or float64, got ", name_of(dx_sum.scalar_type()));
  check_floating(op, "dx", dx);
  Backend backend(dx_sum);
  const ScalarType acc = dx_sum.scalar_type();
  const Chunk chunk = shard_chunk(op, counts, rows, dx_sum, first_row, dx_sum.size(0));
  const int64_t hidden = dx_sum.size(1);
  check_matrix(op, "dx_sum", dx_sum, acc, chunk.size, hidden, dx_sum);
  check_vector(op, "alpha", alpha, acc, 3, dx_sum);
  check_matrix(op, "dx", dx, dx.scalar_type(), rows.numel(), hidden, dx_sum);
  if (dx_scale) check_vector(op, "dx_scale", *dx_scale, ScalarType::Float, rows.numel(), dx_sum);
  backend.store_rows(StoreRowsParams{chunk, dx_sum.const_data_ptr(), hidden, hidden, alpha.const_data_ptr(),
                                     dtype_of(acc), dx.mutable_data_ptr(), dtype_of(dx.scalar_type()), hidden,
                                     dx_scale ? static_cast<float*>(dx_scale->mutable_data_ptr()) : nullptr});
}

// Rows of a chunk where a backend's own kernels take a slice (flce_shard_fused_*), 0 where they do not. Of what is the
// same on each device of a group, if these are of one kind: slices must not disagree.
template <class Backend>
int64_t flce_shard_fused_rows(Tensor input, int64_t largest_slice, ScalarType compute_dtype, ScalarType weight_dtype,
                              bool biased, double label_smoothing, std::optional<double> softcap,
                              std::optional<int64_t> chunk_rows, std::optional<int64_t> workspace_bytes, bool lean) {
  constexpr const char* op = "syncfree::flce_shard_fused_rows";
  SF_CHECK(input.dim() == 2 && largest_slice >= 1, op, ": expected input (rows, hidden) and a class, got shape ",
           shape_of(input), " and ", largest_slice, " classes");
  if constexpr (Backend::kHasFused)
    return Backend(input).fused_shard_rows({compute_dtype, input.scalar_type(), weight_dtype, input.size(0),
                                            input.size(1), largest_slice, biased, label_smoothing, softcap.value_or(0),
                                            chunk_rows.value_or(0), workspace_bytes.value_or(0), lean});
  return 0;
}

}  // namespace syncfree
