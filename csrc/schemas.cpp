// Every op of the library, read as its API. Kernels register beside their implementations: csrc/cpu/registration.cpp,
// csrc/cuda/registration.cpp; fakes, autograd and the composite bodies are in syncfree_ext/ops.py. The mathematics is
// in docs/semantics.md.
//
// Conventions
//   BT rows, H hidden size, V classes. `target` may be [BT] or [B, T]; its last dimension is the sequence that `shift`
// moves along.
//   Output that was not asked for has shape [0]. No op reads device memory from the host.
//   counts   float64[8] on the device: N, D, C, 1/divisor of the cross-entropy part, 1/divisor of the z part,
//            max |weight|, max |row multiplier|, 0 (csrc/common/params.h names the slots).
//   rows     int32[BT]: the valid rows in order, then the ignored ones in order.
#include <torch/csrc/stable/library.h>

#define SYNCFREE_OPTIONS                                                                                               \
  "str reduction=\"mean\", int ignore_index=-100, float label_smoothing=0.0, float? softcap=None, "                    \
  "bool token_scaling=False, float logit_scale=1.0, float z_loss_weight=0.0, Tensor? logit_scale_tensor=None, "        \
  "Tensor? z_loss_weight_tensor=None, SymInt shift=0"

#define SYNCFREE_TENSORS "Tensor? weight=None, Tensor? token_weight=None, Tensor? num_items=None"

#define SYNCFREE_CHUNKS "SymInt? chunk_rows=None, SymInt? workspace_bytes=None"

STABLE_TORCH_LIBRARY(syncfree, m) {
  // The loss, differentiable in input, linear_weight and linear_bias. A composite: its body chooses what flce_forward
  // computes.
  m.def("flce(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias=None, *, " SYNCFREE_TENSORS
        ", " SYNCFREE_OPTIONS ", " SYNCFREE_CHUNKS ", ScalarType? accum_dtype=None) -> Tensor");

  // The loss and, where asked for, its gradients for an upstream gradient of 1. compute_dtype is the dtype of the
  // matrix products (autocast); gradients come in the dtype of their leaf. A float16 gradient carries a power of two
  // for each row: dx_scale[BT], dw_scale[V] (float32) hold the factors that remove it; they are empty for other dtypes.
  m.def(
      "flce_forward(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias=None, *, " SYNCFREE_TENSORS
      ", " SYNCFREE_OPTIONS ", " SYNCFREE_CHUNKS
      ", bool lean=False, ScalarType? compute_dtype=None, bool need_dx=False, bool need_dw=False, bool need_db=False, "
      "bool need_token_accuracy=False, bool need_predicted_tokens=False, bool need_logsumexp=False) -> "
      "(Tensor loss, Tensor z_loss, Tensor token_accuracy, Tensor predicted_tokens, Tensor logsumexp, Tensor dx, Tensor dw, "
      "Tensor db, Tensor dx_scale, Tensor dw_scale)");

  // The gradients alone, recomputed for any upstream gradient: 0-D for "mean" and "sum", [BT] for "none".
  m.def(
      "flce_backward(Tensor grad_output, Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias=None, "
      "*, " SYNCFREE_TENSORS ", " SYNCFREE_OPTIONS ", " SYNCFREE_CHUNKS
      ", bool lean=False, ScalarType? compute_dtype=None, bool need_dx=False, bool need_dw=False, bool need_db=False) -> "
      "(Tensor dx, Tensor dw, Tensor db)");

  // Cross-entropy of logits [rows, V] that the caller owns. The composite is differentiable in logits.
  m.def("cross_entropy(Tensor logits, Tensor target, *, " SYNCFREE_TENSORS ", " SYNCFREE_OPTIONS ") -> Tensor");
  // row_stats float[rows, 4] is what cross_entropy_backward needs to avoid a second pass for the statistics; float64
  // for float64.
  m.def(
      "cross_entropy_forward(Tensor logits, Tensor target, *, " SYNCFREE_TENSORS ", " SYNCFREE_OPTIONS
      ", bool need_token_accuracy=False, bool need_predicted_tokens=False, bool need_logsumexp=False) -> "
      "(Tensor loss, Tensor z_loss, Tensor token_accuracy, Tensor predicted_tokens, Tensor logsumexp, Tensor row_stats)");
  m.def(
      "cross_entropy_backward(Tensor grad_output, Tensor logits, Tensor target, Tensor row_stats, *, " SYNCFREE_TENSORS
      ", " SYNCFREE_OPTIONS ") -> Tensor");

  // A chunk of rows scored against a slice of the vocabulary: linear_weight [n, H] and linear_bias [n] are of the classes
  // [first_class, first_class + n) of num_classes, n may be 0; weight [V], target and token_weight are whole. counts and
  // rows come from count_targets, with the same target and shift: what they hold is trusted. The dtype of linear_weight
  // is that of the products; acc is float32, float64 for float64.
  // logits: acc [chunk_rows, n padded to 16 bytes]. row_stats: acc [chunk_rows, 4], of this slice; where the target is of
  // another slice, the third is the logit of the slice's first class. predicted_tokens int64[BT]: the largest of this
  // slice.
  m.def(
      "flce_shard_logits(Tensor input, Tensor linear_weight, Tensor target, Tensor counts, Tensor rows, "
      "Tensor? linear_bias=None, *, SymInt first_class, SymInt num_classes, SymInt first_row, SymInt chunk_rows, " SYNCFREE_TENSORS
      ", " SYNCFREE_OPTIONS
      ", Tensor(a!)? predicted_tokens=None) -> (Tensor gathered, Tensor logits, Tensor row_stats)");
  // From the row_stats of all classes: the parts of the loss of each row (acc [BT], undivided), the gradient of the logits
  // over their own memory, in the dtype of the products, and this slice's share of dX, without alpha (acc [3]).
  m.def(
      "flce_shard_gradient(Tensor(a!) logits, Tensor row_stats, Tensor linear_weight, Tensor target, Tensor counts, "
      "Tensor rows, Tensor(b!) ce, Tensor(c!) z, Tensor(d!)? logsumexp=None, Tensor? linear_bias=None, *, "
      "SymInt first_class, SymInt num_classes, SymInt first_row, " SYNCFREE_TENSORS ", " SYNCFREE_OPTIONS
      ", bool need_gradient=True, bool need_dx=True) -> (Tensor dx, Tensor alpha)");
  // dw [n, H] (acc, or the dtype of the products) += alpha g^T gathered, db (acc [n], without alpha) += sums of g; = where
  // accumulate is false.
  m.def(
      "flce_shard_weight_gradient(Tensor logits, Tensor gathered, Tensor counts, Tensor rows, Tensor alpha, "
      "Tensor(a!)? dw=None, Tensor(b!)? db=None, *, SymInt first_row, bool accumulate) -> ()");
  // The chunk's rows of dx [BT, H] from the sum of all shares. dx_scale float32[BT]: for float16, as in flce_forward.
  m.def(
      "flce_shard_store_dx(Tensor dx_sum, Tensor counts, Tensor rows, Tensor alpha, Tensor(a!) dx, "
      "Tensor(b!)? dx_scale=None, *, SymInt first_row) -> ()");

  // The same on the Hopper path, where each chunk is as large as the first: its live rows are dealt out on the device, and
  // row k of a chunk is not that of another op's. CUDA only but for the first.
  //
  // The rows of a chunk where it takes the call, else 0: from what no two ranks see differently. largest_slice: of all.
  m.def(
      "flce_shard_fused_rows(Tensor input, SymInt largest_slice, *, ScalarType compute_dtype, ScalarType weight_dtype, "
      "bool biased=False, float label_smoothing=0.0, float? softcap=None, " SYNCFREE_CHUNKS
      ", bool lean=False) -> SymInt");
  // Before the first chunk. target_logits float32[BT], in the order of rows: x w_t where the slice has the target, NaN
  // where no slice has it, else 0; the caller adds them up. class_rows: the rows of each class of the slice. dw [n, H] and
  // dw_low: what the chunks add to, not yet set; dw_low has eight more bits of a bfloat16 dw, or is empty.
  m.def(
      "flce_shard_fused_begin(Tensor input, Tensor linear_weight, Tensor target, Tensor counts, Tensor rows, *, "
      "SymInt first_class, SymInt num_classes, SymInt chunk_rows, ScalarType weight_dtype, SymInt shift=0, "
      "bool lean=False, bool need_dw=True) -> (Tensor target_logits, Tensor class_rows, Tensor dw, Tensor dw_low)");
  // e: E of csrc/cuda/kernels/fused.h, [chunk_rows, n rounded up to 64]. row_stats float32[4, chunk_rows]: exponent, sum
  // of E, target's logit before logit_scale (0 where another slice has it), rounding residue of the sum.
  // predicted_tokens as above; largest float32[BT], in the order of rows: the logit that it is the class of.
  m.def(
      "flce_shard_fused_logits(Tensor input, Tensor linear_weight, Tensor target, Tensor counts, Tensor rows, "
      "Tensor target_logits, *, SymInt first_class, SymInt num_classes, SymInt first_row, SymInt chunk_rows, " SYNCFREE_TENSORS
      ", " SYNCFREE_OPTIONS
      ", bool need_e=True, Tensor(a!)? predicted_tokens=None, Tensor(b!)? largest=None) -> "
      "(Tensor gathered, Tensor e, Tensor row_stats)");
  // From the row_stats of this slice and of all: the parts of the loss of each row, the gradients of the targets' logits
  // (in the order of rows), this slice's share of dX (with the divisor), and what E is to be multiplied by.
  m.def(
      "flce_shard_fused_gradient(Tensor e, Tensor slice_stats, Tensor row_stats, Tensor linear_weight, Tensor target, "
      "Tensor counts, Tensor rows, Tensor(a!) target_gradients, Tensor(b!) ce, Tensor(c!) z, "
      "Tensor(d!)? logsumexp=None, *, SymInt first_class, SymInt num_classes, SymInt first_row, " SYNCFREE_TENSORS
      ", " SYNCFREE_OPTIONS ", bool need_dx=True) -> (Tensor dx, Tensor v)");
  // gathered *= v and the divisor, then dw += e^T gathered; = where accumulate is false.
  m.def(
      "flce_shard_fused_weight_gradient(Tensor e, Tensor(a!) gathered, Tensor v, Tensor counts, Tensor rows, "
      "Tensor class_rows, Tensor(b!) dw, Tensor(c!) dw_low, *, SymInt first_row, bool accumulate) -> ()");
  // After the last chunk: the targets' share of dW, rounded once, to out or in place.
  m.def(
      "flce_shard_fused_add_targets(Tensor input, Tensor counts, Tensor rows, Tensor class_rows, "
      "Tensor target_gradients, Tensor(a!) dw, Tensor dw_low, Tensor(b!)? out=None) -> ()");
  m.def(
      "flce_shard_fused_store_dx(Tensor dx_sum, Tensor counts, Tensor rows, Tensor(a!) dx, *, SymInt first_row) -> ()");

  // Statistics of the targets and the list of valid rows, all on the device.
  m.def("count_targets(Tensor target, SymInt num_classes, *, " SYNCFREE_TENSORS
        ", str reduction=\"mean\", int ignore_index=-100, SymInt shift=0) -> (Tensor counts, Tensor rows)");

  // grads[i] *= scale, or scale * row_scales[i][row] where that is not empty; nothing is written where the factor is 1.
  // row_scales is None, empty, or has one entry for each of grads.
  m.def("scale_unless_one_(Tensor(a!)[] grads, Tensor scale, Tensor[]? row_scales=None) -> ()");

  // --- the training loop (docs/training_loops.md) ---

  // Stores scalars into row (ticket - 1) % rows of slots, int64[rows, 4 + columns]: a header (csrc/common/loop_params.h)
  // and the columns, float64 bits before first_integer_column and int64 from there on. columns names those of values,
  // then those of constants. The ticket comes last, so that a reader of mapped memory knows when a row is whole. With
  // counters int64[2 + origins] the ticket is counters[0] + 1, counted on the device: so a CUDA graph can replay it.
  m.def(
      "publish_(Tensor(a!) slots, Tensor[] values, int[] columns, float[] constants, *, "
      "int first_integer_column, int ticket=0, Tensor(b!)? counters=None, int origin=0) -> ()");
  // Host side of publish_: the row of a ticket, whole if its first two entries are that ticket. CPU tensors only.
  m.def("read_slot(Tensor slots, int ticket) -> Tensor");
  // Slots in mapped page-locked memory that is never freed, as a CPU tensor and as one on the device of `like`. CUDA
  // only.
  m.def("mapped_slots(Tensor like, SymInt rows, SymInt width) -> (Tensor host, Tensor device)");

  // For each row of mask (bool [..., L]) the positions that are set, min(count, size, max_kept, limit) of them in
  // ascending order, then fill_value: indices int64[..., size], valid bool[..., size], count int64[...]. The first
  // ones; with keys (floating, [..., L]) those with the smallest keys; with seed those with the smallest Philox keys of
  // (seed, row id, position). row_ids and limit are int64 with one entry for each row.
  m.def(
      "masked_indices(Tensor mask, SymInt size, *, Tensor? keys=None, int? seed=None, Tensor? row_ids=None, "
      "Tensor? limit=None, SymInt? max_kept=None, int fill_value=0) -> (Tensor indices, Tensor valid, Tensor count)");
}
