// The chunk loop of the Hopper path: gather, E, losses, dX, dW, with every count on the device. kernels/fused.h names
// the pieces.
#include "../../common/workspace.h"
#include "fused_plan.h"

namespace syncfree {
#ifndef SYNCFREE_HOPPER

bool CudaBackend::fuses(const FlceProblem&, const LossInputs&) const {
  return false;
}

FlceGradients CudaBackend::run_fused(const FlceProblem&, const LossInputs&, const Counts&, const Upstream&,
                                     const LossOutputs*, FlceNeeds) {
  throw std::logic_error("syncfree: built without sm_90a");
}

#else

namespace {

template <class T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// What a call takes besides its rows.
struct Options {
  bool bias, softcap, smoothing;
  explicit Options(const FlceProblem& problem, const LossInputs& in)
      : bias(problem.bias.has_value()), softcap(in.options.softcap > 0), smoothing(in.options.label_smoothing > 0) {}
};

// What lives between the kernels of a call, but for E and the low bytes of dW. Null where it is not needed.
struct Scratch {
  void* gathered;  // bfloat16 [chunk rows, hidden]
  float* product;  // [chunk rows, hidden]
  int32_t* lists;  // of FusedSortParams: 4 [rows], 2 [classes]
  int32_t* zeros;  // [classes]: instead of FusedSortParams::starts, where each class keeps its low bytes
  float* bias;     // FusedBiasParams::out
  float* bias_sums;
  float* row_sums;
  double* beside_sums;                  // FusedRowSumParams::beside_slices
  float *smooth_w, *smooth_x;           // [hidden]: label smoothing's sums of the rows of W and of x
  double *smooth_bias, *smooth_offset;  // [1]: of the bias, and of the rows' offsets
  FusedRows rows;
  int64_t padded;
  int dx_parts;

  Scratch(Carver& carver, const FlceProblem& problem, const LossInputs& in, const ChunkPlan& chunks, FlceNeeds need,
          bool argmax) {
    const Options has(problem, in);
    const int64_t chunk_rows = chunks.rows, rows = in.rows, classes = in.num_classes, hidden = problem.hidden,
                  tiles = ceil_div(classes, kLogitsTileColumns), groups = ceil_div(chunk_rows, kRowGroup);
    dx_parts = need.dx ? fused_dx_parts(chunk_rows - chunks.spare, classes, hidden, need.dw) : 1;
    gathered = carver.take<uint16_t>(chunk_rows * hidden);
    product = carver.take<float>(dx_parts > 1 ? chunk_rows * hidden : 0);
    lists = carver.take<int32_t>(need.dw || need.db ? 4 * rows + 2 * classes : 0);
    zeros = carver.take<int32_t>(has.smoothing && need.dw ? classes : 0);
    padded = has.bias || has.softcap ? tiles * kLogitsTileColumns : 0;
    bias = carver.take<float>(padded);
    bias_sums = carver.take<float>(need.db ? fused_bias_gradient_scratch(fused_pitch(classes)) : 0);
    row_sums = carver.take<float>(has.smoothing ? kRowSumSlices * hidden : 0);
    beside_sums = carver.take<double>(has.smoothing ? kRowSumSlices : 0);
    smooth_w = carver.take<float>(has.smoothing ? hidden : 0);
    smooth_x = carver.take<float>(has.smoothing ? hidden : 0);
    smooth_bias = carver.take<double>(has.smoothing && has.bias ? 1 : 0);
    smooth_offset = carver.take<double>(has.smoothing && need.db ? 1 : 0);
    this->rows.exponent = carver.take<float>(chunk_rows);
    this->rows.target = carver.take<int32_t>(chunk_rows);
    this->rows.target_logit = carver.take<float>(chunk_rows);
    this->rows.sums = carver.take<float>(2 * fused_pairs(chunk_rows, tiles));
    this->rows.best = carver.take<float>(argmax ? 2 * fused_pairs(chunk_rows, tiles) : 0);
    this->rows.smooth = carver.take<double>(has.smoothing ? chunk_rows : 0);
    this->rows.v = carver.take<float>(chunk_rows);
    this->rows.bad = carver.take<int32_t>(chunk_rows);
    this->rows.only = carver.take<int32_t>(groups);
    this->rows.any = carver.take<int32_t>(1);
    this->rows.ticket = carver.take<int32_t>(1);
    this->rows.g_target = carver.take<float>(rows);
    this->rows.offset = carver.take<float>(has.smoothing ? rows : 0);
  }
};

// Label smoothing is taken off beside the products, which have been rounded by then: fine as long as not most of a
// gradient goes away again. The epilogues of softcap and of smoothing do not combine.
bool fuses_options(const LossOptions& o) {
  const bool smoothing = o.label_smoothing > 0, softcap = o.softcap > 0;
  return o.label_smoothing <= 0.5 && !(smoothing && softcap) && fuses_softcap(o.softcap);
}

}  // namespace

bool CudaBackend::fuses(const FlceProblem& problem, const LossInputs& in) const {
  return fuses_dtypes(problem.compute, problem.input.scalar_type(), problem.weight_leaf) && in.rows > 0 &&
         problem.hidden % 8 == 0 && has_aligned_rows(problem.weight) && has_aligned_rows(problem.input) &&
         fuses_options(in.options) && fused_supported_device();
}

FlceGradients CudaBackend::run_fused(const FlceProblem& problem, const LossInputs& in, const Counts& counts,
                                     const Upstream& upstream, const LossOutputs* outputs, FlceNeeds need) {
  const Tensor &x = problem.input, &w = problem.weight;
  const int64_t rows = in.rows, classes = in.num_classes, hidden = problem.hidden;
  const int64_t e_pitch = fused_pitch(classes);
  ChunkPlan chunks =
      fused_plan(rows, classes, hidden, problem.chunk_rows, problem.workspace_bytes, problem.lean, need.dw);
  if (!problem.chunk_rows && !problem.workspace_bytes && !problem.lean) chunks = with_spare(chunks, rows, kSpareRows);
  FlceGradients out{
      need.dx ? new_empty(x, {rows, hidden}, x.scalar_type()) : new_empty(x, {0}, x.scalar_type()),
      need.dw ? new_empty(x, {classes, hidden}, problem.weight_leaf) : new_empty(x, {0}, problem.weight_leaf),
      new_empty(x, {need.db ? classes : 0}, in.acc),
      new_empty(x, {0}, ScalarType::Float),
      new_empty(x, {0}, ScalarType::Float),
  };
  const Options has(problem, in);
  const bool store_e = need.any(), need_targets = need.dw || need.db, argmax = outputs && outputs->wants_argmax();
  const Tensor e = new_empty(x, {store_e ? chunks.rows : 0, e_pitch}, ScalarType::BFloat16);
  Carver measure;
  Scratch(measure, problem, in, chunks, need, argmax);
  const Tensor memory = new_bytes(x, measure.bytes());
  Carver carver(memory.mutable_data_ptr());
  const Scratch scratch(carver, problem, in, chunks, need, argmax);
  // dW of bfloat16: rounded once a chunk (lean), or kept in 24 bits where the shape allows, else in float32 beside it.
  const bool exact = need.dw && problem.weight_leaf == ScalarType::BFloat16 && !problem.lean;
  const bool split = exact && can_split(classes, hidden) && chunks.count <= kMaxSplitChunks;
  const Tensor dw_sum = exact && !split ? new_empty(x, {classes, hidden}, ScalarType::Float) : out.dw;
  const Tensor low = new_bytes(x, split ? split_low_bytes(classes, hidden) : 0);
  uint8_t* low_ptr = split ? data<uint8_t>(low) : nullptr;

  const double* counts_ptr = static_cast<const double*>(counts.counts.const_data_ptr());
  const int32_t* row_index = static_cast<const int32_t*>(counts.rows.const_data_ptr());
  const float* upstream_ptr = static_cast<const float*>(upstream.scalar);
  void* dx_ptr = need.dx ? out.dx.mutable_data_ptr() : nullptr;
  const float *bias = static_cast<const float*>(data_or_null(problem.bias)),
              *class_weight = static_cast<const float*>(data_or_null(in.weight));
  const DType x_dtype = dtype_of(x.scalar_type());

  // Which rows each class is the target of: found beside the first chunk's gather and losses.
  FusedSortParams sort{};
  if (need_targets) {
    int32_t* at = scratch.lists;
    sort = {counts_ptr, row_index, rows,          classes,       in.targets(),  in.shift,
            at,         at + rows, at + 2 * rows, at + 3 * rows, at + 4 * rows, at + 4 * rows + classes};
  }
  if (scratch.bias) done(launch_fused_bias({bias, classes, scratch.padded, scratch.bias}, stream_), "fused bias");
  if (has.smoothing)
    done(launch_fused_row_sum(
             {w.const_data_ptr(), DType::bf16, pitch_of(w), hidden, classes, nullptr, nullptr, class_weight, bias,
              scratch.row_sums, scratch.smooth_w, scratch.beside_sums, scratch.smooth_bias},
             stream_),
         "fused row sum");
  if (scratch.zeros)
    done(cudaMemsetAsync(scratch.zeros, 0, size_t(classes) * sizeof(int32_t), stream_), "fused targets");
  FusedBiasGradientParams db{};

  for (int64_t i = 0; i < chunks.count; ++i) {
    const FusedChunk chunk{counts_ptr, row_index, rows, i, chunks.rows, chunks.spare, upstream_ptr};
    const FusedSortParams sorted_here = i == 0 ? sort : FusedSortParams{};
    done(launch_fused_gather({chunk,
                              x.const_data_ptr(),
                              x_dtype,
                              pitch_of(x),
                              hidden,
                              w.const_data_ptr(),
                              pitch_of(w),
                              classes,
                              bias,
                              {scratch.smooth_w, scratch.smooth_bias},
                              in.targets(),
                              in.shift,
                              in.options,
                              scratch.gathered,
                              dx_ptr,
                              x_dtype,
                              scratch.rows,
                              sorted_here},
                             stream_),
         "fused gather");
    const FusedLogitsParams logits{chunk,        scratch.gathered, w.const_data_ptr(),
                                   pitch_of(w),  classes,          hidden,
                                   scratch.bias, in.options,       store_e ? e.mutable_data_ptr() : nullptr,
                                   e_pitch,      scratch.rows};
    const int64_t tiles = ceil_div(classes, kLogitsTileColumns);
    done(launch_fused_logits(logits, stream_), "fused logits");
    FusedFinishParams finish{
        chunk,      row_params(in, upstream), scratch.rows, tiles, false, need.dw ? scratch.gathered : nullptr, hidden,
        sorted_here};
    finish.row.chunk.counts = chunk.counts;  // what the formulas read of it
    finish.row.bias = bias;
    if (outputs) outputs->attach(finish.row);
    done(launch_fused_finish(finish, stream_), "fused finish");
    done(launch_fused_repair(logits, tiles, stream_), "fused repair");
    finish.repair = true, finish.sort = {};
    done(launch_fused_finish(finish, stream_), "fused finish");
    const FusedDxParams dx{chunk,  e.const_data_ptr(), e_pitch,         w.const_data_ptr(), pitch_of(w),  classes,
                           hidden, scratch.dx_parts,   scratch.product, scratch.smooth_w,   scratch.rows, dx_ptr,
                           x_dtype};
    if (need.dx) done(launch_fused_dx(dx, stream_), "fused dx");
    if (need.dw)
      done(launch_fused_dw({chunk, e.const_data_ptr(), e_pitch, scratch.gathered, classes, hidden,
                            dw_sum.mutable_data_ptr(), dtype_of(dw_sum.scalar_type()), i > 0, scratch.rows.ticket,
                            need.dx, low_ptr, scratch.zeros ? scratch.zeros : sort.starts},
                           stream_),
           "fused dw");
    if (need.dx) done(launch_fused_dx_store(dx, stream_), "fused dx");
    if (need.db) {
      db = {chunk,
            e.const_data_ptr(),
            e_pitch,
            classes,
            scratch.rows.v,
            i > 0,
            scratch.bias_sums,
            sort.positions,
            sort.starts,
            sort.ends,
            scratch.rows.g_target,
            scratch.smooth_offset,
            class_weight,
            data<float>(out.db)};
      done(launch_fused_bias_slices(db, stream_), "fused bias gradient");
    }
  }

  if (has.smoothing && need_targets)
    done(launch_fused_row_sum(
             {x.const_data_ptr(), x_dtype, pitch_of(x), hidden, 0, counts_ptr, row_index, scratch.rows.offset, nullptr,
              scratch.row_sums, scratch.smooth_x, scratch.beside_sums, scratch.smooth_offset},
             stream_),
         "fused row sum");
  if (need.db) done(launch_fused_bias_finish(db, stream_), "fused bias gradient");
  if (need.dw) {
    done(launch_fused_targets({counts_ptr,
                               upstream_ptr,
                               row_index,
                               sort.keys,
                               sort.positions,
                               sort.starts,
                               sort.ends,
                               rows,
                               classes,
                               hidden,
                               x.const_data_ptr(),
                               x_dtype,
                               pitch_of(x),
                               scratch.rows.g_target,
                               scratch.smooth_x,
                               class_weight,
                               dw_sum.const_data_ptr(),
                               dtype_of(dw_sum.scalar_type()),
                               low_ptr,
                               out.dw.mutable_data_ptr(),
                               dtype_of(problem.weight_leaf)},
                              stream_),
         "fused targets");
  }
  return out;
}

#endif

}  // namespace syncfree
