// The chunk loop of the Hopper path: gather, E, losses, dX, dW, with every count on the device. kernels/fused.h names
// the pieces.
#include "../kernels/fused.h"
#include "../backend.h"

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

bool is_aligned16(const void* p) {
  return (reinterpret_cast<uintptr_t>(p) & 15) == 0;
}

// Cutting a sum to 24 bits once a chunk shrinks it a little each time. In a simulation the error of dW was 1.01 times
// that of one rounding at 32 chunks and 1.11 times at 128; 1.2 is the bound.
constexpr int64_t kMaxSplitChunks = 64;

int64_t tiles_of(int64_t num_classes) {
  return ceil_div(num_classes, kLogitsTileColumns);
}

template <class T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

}  // namespace

bool CudaBackend::fuses(const FlceProblem& problem, const LossInputs& in) const {
  const auto wide = [](ScalarType type) { return type == ScalarType::BFloat16 || type == ScalarType::Float; };
  const int64_t hidden = problem.hidden, element = int64_t(problem.input.element_size());
  return problem.compute == ScalarType::BFloat16 && wide(problem.input.scalar_type()) && wide(problem.weight_leaf) &&
         in.rows > 0 && hidden % 8 == 0 && pitch_of(problem.weight) % 8 == 0 &&
         pitch_of(problem.input) * element % 16 == 0 && is_aligned16(problem.weight.const_data_ptr()) &&
         is_aligned16(problem.input.const_data_ptr()) && !problem.bias && !in.weight && in.options.softcap == 0 &&
         in.options.label_smoothing == 0 && fused_supported_device();
}

FlceGradients CudaBackend::run_fused(const FlceProblem& problem, const LossInputs& in, const Counts& counts,
                                     const Upstream& upstream, const LossOutputs* outputs, FlceNeeds need) {
  const Tensor &x = problem.input, &w = problem.weight;
  const int64_t rows = in.rows, classes = in.num_classes, hidden = problem.hidden, tiles = tiles_of(classes);
  const int64_t e_pitch = round_up(classes, 64);
  const ChunkPlan plan = plan_chunks(rows, e_pitch * 2, problem.chunk_rows, problem.workspace_bytes, kDefaultWorkspace,
                                     kMinRows, kRowMultiple);
  const bool store_e = need.dx || need.dw;
  FlceGradients out{
      need.dx ? new_empty(x, {rows, hidden}, x.scalar_type()) : new_empty(x, {0}, x.scalar_type()),
      need.dw ? new_empty(x, {classes, hidden}, problem.weight_leaf) : new_empty(x, {0}, problem.weight_leaf),
      new_empty(x, {0}, in.acc),
      new_empty(x, {0}, ScalarType::Float),
      new_empty(x, {0}, ScalarType::Float),
  };
  const Tensor e = new_empty(x, {store_e ? plan.rows : 0, e_pitch}, ScalarType::BFloat16);
  const Tensor gathered = new_empty(x, {plan.rows, hidden}, ScalarType::BFloat16);
  const Tensor product = new_empty(x, {need.dx ? plan.rows : 0, hidden}, ScalarType::Float);
  const Tensor sums = new_empty(x, {tiles, plan.rows, 2}, ScalarType::Float);
  const bool argmax = outputs && outputs->wants_argmax();
  const Tensor best = new_empty(x, {argmax ? tiles : 0, plan.rows, 2}, ScalarType::Float);
  const Tensor row_floats = new_empty(x, {3, plan.rows}, ScalarType::Float);
  const Tensor row_ints = new_empty(x, {2 * plan.rows + ceil_div(plan.rows, kRowGroup) + 1}, ScalarType::Int);
  const Tensor g_target = new_empty(x, {rows}, ScalarType::Float);
  const Tensor alpha = new_empty(x, {3}, ScalarType::Float);
  // dW of bfloat16: rounded once a chunk (lean), or kept in 24 bits where the shape allows, else in float32 beside it.
  const bool exact = need.dw && problem.weight_leaf == ScalarType::BFloat16 && !problem.lean;
  const bool split = exact && can_split(classes, hidden) && plan.count <= kMaxSplitChunks;
  const Tensor dw_sum = exact && !split ? new_empty(x, {classes, hidden}, ScalarType::Float) : out.dw;
  const Tensor low = new_bytes(x, split ? split_low_bytes(classes, hidden) : 0);
  uint8_t* low_ptr = split ? data<uint8_t>(low) : nullptr;

  FusedRows arrays{};
  arrays.exponent = data<float>(row_floats);
  arrays.target_logit = arrays.exponent + plan.rows;
  arrays.v = arrays.target_logit + plan.rows;
  arrays.target = data<int32_t>(row_ints);
  arrays.bad = arrays.target + plan.rows;
  arrays.only = arrays.bad + plan.rows;
  arrays.any = arrays.only + ceil_div(plan.rows, kRowGroup);
  arrays.sums = sums.mutable_data_ptr();
  arrays.best = argmax ? best.mutable_data_ptr() : nullptr;
  arrays.g_target = data<float>(g_target);
  const float* alpha_ptr = data<float>(alpha);
  this->alpha(AlphaParams{static_cast<const double*>(counts.counts.const_data_ptr()), in.options, upstream.scalar,
                          false, DType::f32, alpha.mutable_data_ptr()});

  // Which rows each class is the target of; known before the first product.
  const int32_t* row_index = static_cast<const int32_t*>(counts.rows.const_data_ptr());
  const int64_t scratch_bytes = need.dw ? int64_t(fused_sort_scratch_bytes(rows, classes)) : 0;
  const Tensor lists = new_empty(x, {need.dw ? 4 * rows + 2 * classes : 0}, ScalarType::Int),
               scratch = new_bytes(x, scratch_bytes);
  FusedSortParams sort{};
  if (need.dw) {
    int32_t* at = data<int32_t>(lists);
    sort = {static_cast<const double*>(counts.counts.const_data_ptr()),
            row_index,
            rows,
            classes,
            in.targets(),
            in.shift,
            at,
            at + rows,
            at + 2 * rows,
            at + 3 * rows,
            at + 4 * rows,
            at + 4 * rows + classes,
            scratch.mutable_data_ptr(),
            size_t(scratch_bytes)};
    done(launch_fused_sort(sort, stream_), "fused sort");
  }

  for (int64_t i = 0; i < plan.count; ++i) {
    const FusedChunk chunk{static_cast<const double*>(counts.counts.const_data_ptr()), row_index, rows, i, plan.rows};
    done(launch_fused_gather(
             {chunk, x.const_data_ptr(), dtype_of(x.scalar_type()), pitch_of(x), hidden, w.const_data_ptr(),
              pitch_of(w), classes, in.targets(), in.shift, in.options, gathered.mutable_data_ptr(), arrays},
             stream_),
         "fused gather");
    const FusedLogitsParams logits{chunk,
                                   gathered.const_data_ptr(),
                                   w.const_data_ptr(),
                                   pitch_of(w),
                                   classes,
                                   hidden,
                                   in.options,
                                   store_e ? e.mutable_data_ptr() : nullptr,
                                   e_pitch,
                                   arrays};
    done(launch_fused_logits(logits, stream_), "fused logits");
    FusedFinishParams finish{chunk, row_params(in, upstream), arrays, tiles, false};
    finish.row.chunk.counts = chunk.counts;  // what the formulas read of it
    if (outputs) outputs->attach(finish.row);
    done(launch_fused_finish(finish, stream_), "fused finish");
    done(launch_fused_repair(logits, tiles, stream_), "fused repair");
    finish.repair = true;
    done(launch_fused_finish(finish, stream_), "fused finish");
    if (need.dx)
      done(launch_fused_dx(
               {chunk, e.const_data_ptr(), e_pitch, w.const_data_ptr(), pitch_of(w), classes, hidden,
                data<float>(product), arrays, alpha_ptr, out.dx.mutable_data_ptr(), dtype_of(x.scalar_type())},
               stream_),
           "fused dx");
    if (need.dw) {
      done(launch_fused_scale({chunk, gathered.mutable_data_ptr(), hidden, arrays.v, alpha_ptr}, stream_),
           "fused scale");
      done(launch_fused_dw({chunk, e.const_data_ptr(), e_pitch, gathered.const_data_ptr(), classes, hidden,
                            dw_sum.mutable_data_ptr(), dtype_of(dw_sum.scalar_type()), i > 0, low_ptr, sort.starts},
                           stream_),
           "fused dw");
    }
  }

  if (need.dw) {
    done(launch_fused_targets(
             {row_index, sort.positions, sort.starts, sort.ends, classes, hidden, x.const_data_ptr(),
              dtype_of(x.scalar_type()), pitch_of(x), arrays.g_target, alpha_ptr, dw_sum.const_data_ptr(),
              dtype_of(dw_sum.scalar_type()), low_ptr, out.dw.mutable_data_ptr(), dtype_of(problem.weight_leaf)},
             stream_),
         "fused targets");
  }
  return out;
}

#endif

}  // namespace syncfree
