// A chunk of the Hopper path over a slice of the classes, cut where the slices exchange what they know of a row.
#include "fused_shard.h"

#include "../../common/workspace.h"
#include "fused_plan.h"

namespace syncfree {
#ifndef SYNCFREE_HOPPER

namespace {

[[noreturn]] void refuse() {
  throw std::logic_error("syncfree: built without sm_90a");
}

}  // namespace

int64_t CudaBackend::fused_shard_rows(const FusedShardProblem&) const {
  return 0;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> flce_shard_fused_begin(Tensor, Tensor, Tensor, Tensor, Tensor, int64_t,
                                                                  int64_t, int64_t, ScalarType, int64_t, bool, bool) {
  refuse();
}

std::tuple<Tensor, Tensor, Tensor> flce_shard_fused_logits(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int64_t,
                                                           int64_t, int64_t, int64_t, OptionalTensor, OptionalTensor,
                                                           OptionalTensor, Text, int64_t, double, std::optional<double>,
                                                           bool, double, double, OptionalTensor, OptionalTensor,
                                                           int64_t, bool, OptionalTensor, OptionalTensor) {
  refuse();
}

std::tuple<Tensor, Tensor> flce_shard_fused_gradient(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                                                     Tensor, Tensor, OptionalTensor, int64_t, int64_t, int64_t,
                                                     OptionalTensor, OptionalTensor, OptionalTensor, Text, int64_t,
                                                     double, std::optional<double>, bool, double, double,
                                                     OptionalTensor, OptionalTensor, int64_t, bool) {
  refuse();
}

void flce_shard_fused_weight_gradient(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int64_t, bool) {
  refuse();
}

void flce_shard_fused_add_targets(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, OptionalTensor) {
  refuse();
}

void flce_shard_fused_store_dx(Tensor, Tensor, Tensor, Tensor, int64_t) {
  refuse();
}

#else

namespace {

template <class T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// Slots [0, size) of chunk first_row / size. The last chunk may reach past the rows: the device deals the live ones out.
FusedChunk fused_chunk(const char* op, const Tensor& counts, const Tensor& rows, const Tensor& like, int64_t first_row,
                       int64_t size) {
  check_counts(op, counts, rows, like);
  SF_CHECK(size >= 1 && size <= rows.numel() && first_row >= 0 && first_row < rows.numel() && first_row % size == 0, op,
           ": a chunk must be one of those of ", size, " rows from row 0 on, of ", rows.numel(),
           " rows, got first_row ", first_row);
  return {static_cast<const double*>(counts.const_data_ptr()),
          static_cast<const int32_t*>(rows.const_data_ptr()),
          rows.numel(),
          first_row / size,
          size,
          0,
          nullptr};
}

void check_matrix_rows(const char* op, const char* name, const Tensor& t) {
  SF_CHECK(t.dim() == 2 && t.size(1) >= 8 && t.size(1) % 8 == 0 && t.stride(1) == 1 && has_aligned_rows(t), op, ": ",
           name, " must be 2-D with contiguous rows of a multiple of 8 columns, aligned to 16 bytes, got shape ",
           shape_of(t));
}

void check_input(const char* op, const Tensor& input) {
  check_matrix_rows(op, "input", input);
  SF_CHECK(input.scalar_type() == ScalarType::BFloat16 || input.scalar_type() == ScalarType::Float, op,
           ": input must be bfloat16 or float32, got ", name_of(input.scalar_type()));
}

// The checks of Shard, and what the kernels ask for besides.
Shard fused_shard(const char* op, const Tensor& w, int64_t first_class, int64_t num_classes, const Tensor& like) {
  check_same_device(op, "linear_weight", w, like);
  SF_CHECK(w.scalar_type() == ScalarType::BFloat16, op, ": linear_weight must be bfloat16, got ",
           name_of(w.scalar_type()));
  Shard shard(op, w, std::nullopt, first_class, num_classes);
  if (shard.classes) check_matrix_rows(op, "linear_weight", w);
  return shard;
}

FusedSlice slice_of(const Shard& s) {
  return {s.first_class, s.classes, s.num_classes};
}

void check_options(const char* op, const LossInputs& in) {
  SF_CHECK(in.options.label_smoothing == 0 && fuses_softcap(in.options.softcap), op,
           ": expected no label_smoothing and a softcap that is taken, which flce_shard_fused_rows says, got ",
           in.options.label_smoothing, " and ", in.options.softcap);
}

// The lists of FusedSortParams over one tensor: 4 [rows] and 2 [classes] of int32.
FusedSortParams sort_lists(const Tensor& lists, int64_t rows, int64_t classes) {
  FusedSortParams p{};
  int32_t* at = data<int32_t>(lists);
  p.rows = rows, p.num_classes = classes;
  p.tile_keys = at, p.keys = at + rows, p.tile_positions = at + 2 * rows, p.positions = at + 3 * rows;
  p.starts = at + 4 * rows, p.ends = p.starts + classes;
  return p;
}

void check_lists(const char* op, const Tensor& lists, int64_t rows, int64_t classes, const Tensor& like) {
  check_vector(op, "class_rows", lists, ScalarType::Int, 4 * rows + 2 * classes, like);
}

}  // namespace

int64_t CudaBackend::fused_shard_rows(const FusedShardProblem& p) const {
  const bool fuses = fuses_dtypes(p.compute, p.input, p.weight_leaf) && p.rows > 0 && p.hidden % 8 == 0 && !p.biased &&
                     p.label_smoothing == 0 && fuses_softcap(p.softcap) && fused_supported_device();
  if (!fuses) return 0;
  // dW does not run beside dX, which is on its way to the other slices then.
  return fused_plan(p.rows, p.largest_slice, p.hidden, p.chunk_rows, p.workspace_bytes, p.lean, false).rows;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> flce_shard_fused_begin(Tensor input, Tensor linear_weight, Tensor target,
                                                                  Tensor counts, Tensor rows, int64_t first_class,
                                                                  int64_t num_classes, int64_t chunk_rows,
                                                                  ScalarType weight_dtype, int64_t shift, bool lean,
                                                                  bool need_dw) {
  constexpr const char* op = "syncfree::flce_shard_fused_begin";
  check_input(op, input);
  CudaBackend backend(input);
  const Shard shard = fused_shard(op, linear_weight, first_class, num_classes, input);
  const LossInputs in(op, input, ScalarType::Float, input.size(0), num_classes, target, std::nullopt, std::nullopt,
                      std::nullopt, Text{"sum"}, 0, 0.0, std::nullopt, false, 1.0, 0.0, std::nullopt, std::nullopt,
                      shift);
  const FusedChunk chunk = fused_chunk(op, counts, rows, input, 0, chunk_rows);
  SF_CHECK(rows.numel() == in.rows, op, ": rows must have one entry for each of ", in.rows, " rows, got ",
           shape_of(rows));
  const int64_t classes = shard.classes, hidden = shard.hidden;
  SF_CHECK(input.size(1) == hidden, op, ": linear_weight must have shape (classes, ", input.size(1), "), got ",
           shape_of(linear_weight));

  Tensor logits = new_empty(input, {in.rows}, ScalarType::Float);
  FusedShardTargetsParams targets{};
  targets.counts = chunk.counts, targets.row_index = chunk.row_index, targets.rows = in.rows;
  targets.input = input.const_data_ptr(), targets.input_dtype = dtype_of(input.scalar_type());
  targets.input_pitch = pitch_of(input), targets.hidden = hidden;
  targets.weight = shard.weight.const_data_ptr(), targets.weight_pitch = pitch_of(shard.weight);
  targets.slice = slice_of(shard);
  targets.targets = in.targets(), targets.shift = in.shift;
  targets.logits = data<float>(logits);
  CudaBackend::done(launch_fused_shard_targets(targets, backend.stream()), "fused targets");

  // dW of bfloat16: rounded once a chunk (lean), or kept in 24 bits where the shape allows, else in float32.
  const bool exact = weight_dtype == ScalarType::BFloat16 && !lean;
  const bool split = exact && can_split(classes, hidden) && ceil_div(in.rows, chunk.size) <= kMaxSplitChunks;
  Tensor lists = new_empty(input, {need_dw ? 4 * in.rows + 2 * classes : 0}, ScalarType::Int);
  Tensor low = new_bytes(input, need_dw && split ? split_low_bytes(classes, hidden) : 0);
  const ScalarType sum_dtype = exact && !split ? ScalarType::Float : weight_dtype;
  Tensor dw = need_dw ? new_empty(input, {classes, hidden}, sum_dtype) : new_empty(input, {0}, sum_dtype);
  if (need_dw && classes) {
    FusedSortParams sort = sort_lists(lists, in.rows, classes);
    sort.counts = chunk.counts, sort.row_index = chunk.row_index;
    sort.targets = in.targets(), sort.shift = in.shift, sort.first_class = first_class;
    CudaBackend::done(launch_fused_sort(sort, backend.stream()), "fused sort");
  }
  return {logits, lists, dw, low};
}

std::tuple<Tensor, Tensor, Tensor> flce_shard_fused_logits(Tensor input, Tensor linear_weight, Tensor target,
                                                           Tensor counts, Tensor rows, Tensor target_logits,
                                                           int64_t first_class, int64_t num_classes, int64_t first_row,
                                                           int64_t chunk_rows, SF_OPTION_PARAMETERS, bool need_e,
                                                           OptionalTensor predicted_tokens, OptionalTensor largest) {
  constexpr const char* op = "syncfree::flce_shard_fused_logits";
  check_input(op, input);
  CudaBackend backend(input);
  const cudaStream_t stream = backend.stream();
  const Shard shard = fused_shard(op, linear_weight, first_class, num_classes, input);
  const LossInputs in(op, input, ScalarType::Float, input.size(0), num_classes, target, SF_OPTION_ARGUMENTS);
  check_options(op, in);
  const FusedChunk chunk = fused_chunk(op, counts, rows, input, first_row, chunk_rows);
  const int64_t classes = shard.classes, hidden = shard.hidden, size = chunk.size, e_pitch = fused_pitch(classes),
                tiles = ceil_div(classes, kLogitsTileColumns);
  SF_CHECK(input.size(1) == hidden && rows.numel() == in.rows, op, ": linear_weight and rows must fit input of shape ",
           shape_of(input));
  check_vector(op, "target_logits", target_logits, ScalarType::Float, in.rows, input);
  SF_CHECK(bool(predicted_tokens) == bool(largest), op, ": predicted_tokens and largest come together");
  if (predicted_tokens) {
    check_vector(op, "predicted_tokens", *predicted_tokens, ScalarType::Long, in.rows, input);
    check_vector(op, "largest", *largest, ScalarType::Float, in.rows, input);
  }

  Tensor gathered = new_empty(input, {size, hidden}, ScalarType::BFloat16);
  Tensor e = new_empty(input, {need_e ? size : 0, e_pitch}, ScalarType::BFloat16);
  Tensor stats = new_empty(input, {int64_t(kShardStats), size}, ScalarType::Float);
  FusedRows row_arrays{};
  float* bias = nullptr;  // the epilogue of the softcap takes one: zeros
  const int64_t padded = in.options.softcap > 0 ? tiles * kLogitsTileColumns : 0;
  const auto carve = [&](Carver carver) {
    row_arrays.exponent = carver.take<float>(size);
    row_arrays.target = carver.take<int32_t>(size);
    row_arrays.target_logit = carver.take<float>(size);
    row_arrays.sums = carver.take<float>(2 * fused_pairs(size, tiles));
    row_arrays.best = carver.take<float>(predicted_tokens ? 2 * fused_pairs(size, tiles) : 0);
    row_arrays.bad = carver.take<int32_t>(size);
    row_arrays.only = carver.take<int32_t>(ceil_div(size, kRowGroup));
    row_arrays.any = carver.take<int32_t>(1);
    bias = carver.take<float>(padded);
    return carver.bytes();
  };
  const Tensor memory = new_bytes(input, carve(Carver()));
  carve(Carver(memory.mutable_data_ptr()));

  FusedShardGatherParams gather{};
  gather.chunk = chunk;
  gather.input = input.const_data_ptr(), gather.input_dtype = dtype_of(input.scalar_type());
  gather.input_pitch = pitch_of(input), gather.hidden = hidden;
  gather.slice = slice_of(shard);
  gather.targets = in.targets(), gather.shift = in.shift, gather.options = in.options;
  gather.logits = static_cast<const float*>(target_logits.const_data_ptr());
  gather.gathered = gathered.mutable_data_ptr();
  gather.rows = row_arrays;
  CudaBackend::done(launch_fused_shard_gather(gather, stream), "fused gather");

  FusedLogitsParams logits{};
  logits.chunk = chunk;
  logits.gathered = gathered.const_data_ptr();
  logits.weight = shard.weight.const_data_ptr(), logits.weight_pitch = pitch_of(shard.weight);
  logits.num_classes = classes, logits.hidden = hidden;
  logits.bias = bias, logits.options = in.options;
  logits.e = need_e ? e.mutable_data_ptr() : nullptr, logits.e_pitch = e_pitch;
  logits.rows = row_arrays;
  FusedShardStatsParams found{};
  found.chunk = chunk, found.rows = row_arrays, found.tiles = tiles;
  found.options = in.options, found.slice = slice_of(shard);
  found.stats = data<float>(stats);
  found.predicted = predicted_tokens ? data<int64_t>(*predicted_tokens) : nullptr;
  found.largest = largest ? data<float>(*largest) : nullptr;
  if (padded) CudaBackend::done(launch_fused_bias({nullptr, classes, padded, bias}, stream), "fused bias");
  if (classes) CudaBackend::done(launch_fused_logits(logits, stream), "fused logits");
  CudaBackend::done(launch_fused_shard_stats(found, stream), "fused statistics");
  if (classes) {
    CudaBackend::done(launch_fused_repair(logits, tiles, stream), "fused repair");
    found.repair = true;
    CudaBackend::done(launch_fused_shard_stats(found, stream), "fused statistics");
  }
  return {gathered, e, stats};
}

std::tuple<Tensor, Tensor> flce_shard_fused_gradient(Tensor e, Tensor slice_stats, Tensor row_stats,
                                                     Tensor linear_weight, Tensor target, Tensor counts, Tensor rows,
                                                     Tensor target_gradients, Tensor ce, Tensor z,
                                                     OptionalTensor logsumexp, int64_t first_class, int64_t num_classes,
                                                     int64_t first_row, SF_OPTION_PARAMETERS, bool need_dx) {
  constexpr const char* op = "syncfree::flce_shard_fused_gradient";
  CudaBackend backend(e);
  const cudaStream_t stream = backend.stream();
  const Shard shard = fused_shard(op, linear_weight, first_class, num_classes, e);
  const LossInputs in(op, e, ScalarType::Float, rows.numel(), num_classes, target, SF_OPTION_ARGUMENTS);
  check_options(op, in);
  SF_CHECK(slice_stats.dim() == 2, op, ": slice_stats must be 2-D, got shape ", shape_of(slice_stats));
  const FusedChunk chunk = fused_chunk(op, counts, rows, e, first_row, slice_stats.size(1));
  const int64_t size = chunk.size, classes = shard.classes, hidden = shard.hidden, e_pitch = fused_pitch(classes);
  check_matrix(op, "slice_stats", slice_stats, ScalarType::Float, kShardStats, size, e);
  check_matrix(op, "row_stats", row_stats, ScalarType::Float, kShardStats, size, e);
  if (need_dx) check_matrix(op, "e", e, ScalarType::BFloat16, size, e_pitch, e);
  check_vector(op, "target_gradients", target_gradients, ScalarType::Float, in.rows, e);
  check_vector(op, "ce", ce, ScalarType::Float, in.rows, e);
  check_vector(op, "z", z, ScalarType::Float, in.rows, e);
  if (logsumexp) check_vector(op, "logsumexp", *logsumexp, ScalarType::Float, in.rows, e);

  Tensor v = new_empty(e, {size}, ScalarType::Float);
  Tensor dx = new_empty(e, {need_dx ? size : 0, hidden}, ScalarType::Float);
  const Tensor targets = new_empty(e, {size}, ScalarType::Int);
  FusedShardFinishParams finish{};
  finish.chunk = chunk;
  finish.row = row_params(in, Upstream());
  finish.row.chunk.counts = chunk.counts;  // what the formulas read of it
  finish.row.ce = ce.mutable_data_ptr(), finish.row.z = z.mutable_data_ptr();
  finish.row.logsumexp = logsumexp ? logsumexp->mutable_data_ptr() : nullptr;
  finish.own_stats = static_cast<const float*>(slice_stats.const_data_ptr());
  finish.stats = static_cast<const float*>(row_stats.const_data_ptr());
  finish.slice = slice_of(shard);
  finish.rows.target = data<int32_t>(targets), finish.rows.v = data<float>(v);
  finish.rows.g_target = data<float>(target_gradients);
  CudaBackend::done(launch_fused_shard_finish(finish, stream), "fused finish");

  if (need_dx && !classes) torch::stable::zero_(dx);
  if (need_dx && classes) {
    FusedDxParams p{};
    p.chunk = chunk;
    p.e = e.const_data_ptr(), p.e_pitch = e_pitch;
    p.weight = shard.weight.const_data_ptr(), p.weight_pitch = pitch_of(shard.weight);
    p.num_classes = classes, p.hidden = hidden;
    p.parts = fused_dx_parts(size, classes, hidden, false);
    p.product = data<float>(dx);
    p.rows = finish.rows;
    p.out = dx.mutable_data_ptr(), p.out_dtype = DType::f32, p.share = true;
    CudaBackend::done(launch_fused_dx(p, stream), "fused dx");
    CudaBackend::done(launch_fused_dx_store(p, stream), "fused dx");
  }
  return {dx, v};
}

void flce_shard_fused_weight_gradient(Tensor e, Tensor gathered, Tensor v, Tensor counts, Tensor rows,
                                      Tensor class_rows, Tensor dw, Tensor dw_low, int64_t first_row, bool accumulate) {
  constexpr const char* op = "syncfree::flce_shard_fused_weight_gradient";
  CudaBackend backend(gathered);
  SF_CHECK(gathered.dim() == 2 && dw.dim() == 2, op, ": gathered and dw must be 2-D, got shapes ", shape_of(gathered),
           " and ", shape_of(dw));
  const FusedChunk chunk = fused_chunk(op, counts, rows, gathered, first_row, gathered.size(0));
  const int64_t size = chunk.size, classes = dw.size(0), hidden = gathered.size(1), e_pitch = fused_pitch(classes);
  check_matrix(op, "gathered", gathered, ScalarType::BFloat16, size, hidden, gathered);
  check_matrix(op, "dw", dw, dw.scalar_type(), classes, hidden, gathered);
  check_vector(op, "v", v, ScalarType::Float, size, gathered);
  if (!classes) return;
  check_matrix(op, "e", e, ScalarType::BFloat16, size, e_pitch, gathered);
  check_lists(op, class_rows, rows.numel(), classes, gathered);
  SF_CHECK(dw_low.numel() == 0 || (can_split(classes, hidden) && dw.scalar_type() == ScalarType::BFloat16), op,
           ": dw_low goes with a bfloat16 dw of a shape that can be split");
  if (dw_low.numel()) check_vector(op, "dw_low", dw_low, ScalarType::Byte, split_low_bytes(classes, hidden), gathered);

  // On another stream the share of dX has just become ready to be added up. This small kernel lets that begin, so that
  // the product takes what multiprocessors are left, instead of keeping all of them from it until its own end.
  const Tensor ticket = new_empty(gathered, {1}, ScalarType::Int);
  const FusedShardScaleParams scale{chunk, gathered.mutable_data_ptr(), hidden, data<float>(v), data<int32_t>(ticket)};
  CudaBackend::done(launch_fused_shard_scale(scale, backend.stream()), "fused scale");
  FusedDwParams p{};
  p.chunk = chunk;
  p.e = e.const_data_ptr(), p.e_pitch = e_pitch;
  p.scaled = gathered.const_data_ptr();
  p.num_classes = classes, p.hidden = hidden;
  p.sum = dw.mutable_data_ptr(), p.sum_dtype = dtype_of(dw.scalar_type());
  p.accumulate = accumulate;
  p.ticket = data<int32_t>(ticket);
  p.low = dw_low.numel() ? data<uint8_t>(dw_low) : nullptr;
  p.starts = sort_lists(class_rows, rows.numel(), classes).starts;
  CudaBackend::done(launch_fused_dw(p, backend.stream()), "fused dw");
}

void flce_shard_fused_add_targets(Tensor input, Tensor counts, Tensor rows, Tensor class_rows, Tensor target_gradients,
                                  Tensor dw, Tensor dw_low, OptionalTensor out) {
  constexpr const char* op = "syncfree::flce_shard_fused_add_targets";
  check_input(op, input);
  CudaBackend backend(input);
  check_counts(op, counts, rows, input);
  SF_CHECK(dw.dim() == 2, op, ": dw must be 2-D, got shape ", shape_of(dw));
  const int64_t classes = dw.size(0), hidden = input.size(1);
  check_matrix(op, "dw", dw, dw.scalar_type(), classes, hidden, input);
  if (out) check_matrix(op, "out", *out, out->scalar_type(), classes, hidden, input);
  check_vector(op, "target_gradients", target_gradients, ScalarType::Float, input.size(0), input);
  if (!classes) return;
  check_lists(op, class_rows, rows.numel(), classes, input);
  if (dw_low.numel()) check_vector(op, "dw_low", dw_low, ScalarType::Byte, split_low_bytes(classes, hidden), input);
  const FusedSortParams sort = sort_lists(class_rows, rows.numel(), classes);
  FusedTargetsParams p{};
  p.counts = static_cast<const double*>(counts.const_data_ptr());
  p.row_index = static_cast<const int32_t*>(rows.const_data_ptr());
  p.keys = sort.keys, p.positions = sort.positions, p.starts = sort.starts, p.ends = sort.ends;
  p.rows = rows.numel(), p.num_classes = classes, p.hidden = hidden;
  p.input = input.const_data_ptr(), p.input_dtype = dtype_of(input.scalar_type()), p.input_pitch = pitch_of(input);
  p.g_target = static_cast<const float*>(target_gradients.const_data_ptr());
  p.sum = dw.const_data_ptr(), p.sum_dtype = dtype_of(dw.scalar_type());
  p.low = dw_low.numel() ? data<uint8_t>(dw_low) : nullptr;
  const Tensor& to = out ? *out : dw;
  p.out = to.mutable_data_ptr(), p.out_dtype = dtype_of(to.scalar_type());
  CudaBackend::done(launch_fused_targets(p, backend.stream()), "fused targets");
}

void flce_shard_fused_store_dx(Tensor dx_sum, Tensor counts, Tensor rows, Tensor dx, int64_t first_row) {
  constexpr const char* op = "syncfree::flce_shard_fused_store_dx";
  CudaBackend backend(dx_sum);
  SF_CHECK(dx_sum.dim() == 2 && dx_sum.size(1) % 8 == 0, op,
           ": dx_sum must be 2-D (chunk_rows, hidden), hidden a multiple of 8, got shape ", shape_of(dx_sum));
  const FusedChunk chunk = fused_chunk(op, counts, rows, dx_sum, first_row, dx_sum.size(0));
  const int64_t hidden = dx_sum.size(1);
  check_matrix(op, "dx_sum", dx_sum, ScalarType::Float, chunk.size, hidden, dx_sum);
  check_matrix(op, "dx", dx, dx.scalar_type(), rows.numel(), hidden, dx_sum);
  const FusedShardStoreParams p{chunk, static_cast<const float*>(dx_sum.const_data_ptr()), hidden,
                                dx.mutable_data_ptr(), dtype_of(dx.scalar_type())};
  CudaBackend::done(launch_fused_shard_store(p, backend.stream()), "fused dx");
}

#endif

}  // namespace syncfree
