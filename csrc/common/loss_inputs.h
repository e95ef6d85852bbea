// The arguments that flce and cross_entropy share, checked once and brought to the form in which kernels read them.
#pragma once

#include <cmath>

#include "chunk_plan.h"
#include "tensor.h"

// The option arguments of the schemas, in their order.
#define SF_OPTION_PARAMETERS                                                                                           \
  OptionalTensor weight, OptionalTensor token_weight, OptionalTensor num_items, Text reduction, int64_t ignore_index,  \
      double label_smoothing, std::optional<double> softcap, bool token_scaling, double logit_scale,                   \
      double z_loss_weight, OptionalTensor logit_scale_tensor, OptionalTensor z_loss_weight_tensor, int64_t shift
#define SF_OPTION_ARGUMENTS                                                                                            \
  weight, token_weight, num_items, reduction, ignore_index, label_smoothing, softcap, token_scaling, logit_scale,      \
      z_loss_weight, logit_scale_tensor, z_loss_weight_tensor, shift

namespace syncfree {

inline Reduction reduction_of(const char* op, const std::string& name) {
  SF_CHECK(name == "none" || name == "mean" || name == "sum", op, ": reduction must be 'none', 'mean' or 'sum', got '",
           name, "'");
  return name == "none" ? Reduction::none : name == "mean" ? Reduction::mean : Reduction::sum;
}

struct LossInputs {
  const char* op;
  ScalarType acc;
  int64_t rows, num_classes, sequence, shift, ignore_index;
  Tensor target;                                            // int64 [rows]
  OptionalTensor weight, token_weight, num_items;           // acc [V], acc [rows], float64 [1]
  OptionalTensor logit_scale_tensor, z_loss_weight_tensor;  // float64 [1]
  LossOptions options;

  LossInputs(const char* op_name, const Tensor& like, ScalarType acc_dtype, int64_t row_count, int64_t classes,
             const Tensor& targets, SF_OPTION_PARAMETERS)
      : op(op_name), acc(acc_dtype), rows(row_count), num_classes(classes), shift(shift), ignore_index(ignore_index) {
    SF_CHECK(classes >= 1, op, ": expected at least one class, got ", classes);
    SF_CHECK(rows <= INT32_MAX, op, ": expected at most 2^31 - 1 rows, got ", rows);
    SF_CHECK(targets.scalar_type() == ScalarType::Long || targets.scalar_type() == ScalarType::Int, op,
             ": target must be int64 or int32, got ", name_of(targets.scalar_type()));
    SF_CHECK(targets.dim() >= 1 && targets.numel() == rows, op, ": target must have one entry for each of ", rows,
             " rows, got shape ", shape_of(targets));
    check_same_device(op, "target", targets, like);
    SF_CHECK(shift >= 0, op, ": shift must be >= 0, got ", shift);
    SF_CHECK(label_smoothing >= 0 && label_smoothing <= 1, op, ": label_smoothing must be in [0, 1], got ",
             label_smoothing);
    SF_CHECK(!softcap || (*softcap > 0 && std::isfinite(*softcap)), op, ": softcap must be > 0 and finite, got ",
             softcap.value_or(0));
    options.reduction = reduction_of(op, reduction.value);
    SF_CHECK(!num_items || options.reduction == Reduction::mean, op,
             ": num_items is the divisor of reduction 'mean', got reduction '", reduction.value, "'");
    target = flat(targets, ScalarType::Long);
    sequence = targets.size(targets.dim() - 1);
    this->shift = std::min(shift, sequence);  // further than the end is past the end, and sums of it do not overflow
    if (weight) {
      check_floating(op, "weight", *weight);
      check_same_device(op, "weight", *weight, like);
      SF_CHECK(weight->dim() == 1 && weight->size(0) == classes, op, ": weight must have shape (", classes, ",), got ",
               shape_of(*weight));
      this->weight = flat(*weight, acc);
    }
    if (token_weight) {
      check_floating(op, "token_weight", *token_weight);
      check_same_device(op, "token_weight", *token_weight, like);
      SF_CHECK(token_weight->numel() == rows, op, ": token_weight must have one entry for each of ", rows,
               " rows, got shape ", shape_of(*token_weight));
      this->token_weight = flat(*token_weight, acc);
    }
    this->num_items = scalar("num_items", num_items, like);
    this->logit_scale_tensor = scalar("logit_scale", logit_scale_tensor, like);
    this->z_loss_weight_tensor = scalar("z_loss_weight", z_loss_weight_tensor, like);
    options.label_smoothing = label_smoothing;
    options.softcap = softcap.value_or(0);
    options.logit_scale = logit_scale;
    options.logit_scale_ptr = static_cast<const double*>(data_or_null(this->logit_scale_tensor));
    options.z_loss_weight = z_loss_weight;
    options.z_loss_weight_ptr = static_cast<const double*>(data_or_null(this->z_loss_weight_tensor));
    options.token_scaling = token_scaling;
  }

  bool is_none() const { return options.reduction == Reduction::none; }
  const int64_t* targets() const { return static_cast<const int64_t*>(target.const_data_ptr()); }

 private:
  OptionalTensor scalar(const char* name, const OptionalTensor& t, const Tensor& like) const {
    if (!t) return std::nullopt;
    SF_CHECK(t->numel() == 1, op, ": ", name, " must have one element, got shape ", shape_of(*t));
    check_same_device(op, name, *t, like);
    return flat(*t, ScalarType::Double);
  }
};

// The upstream gradient: one for all rows, or one a row ("none", any stride, stride 0 included).
struct Upstream {
  OptionalTensor tensor;
  const void* scalar = nullptr;
  const void* per_row = nullptr;
  int64_t stride = 0;

  Upstream() = default;
  Upstream(const LossInputs& in, const Tensor& grad, const Tensor& like) {
    check_same_device(in.op, "grad_output", grad, like);
    check_floating(in.op, "grad_output", grad);
    if (in.is_none()) {
      SF_CHECK(grad.dim() == 1 && grad.size(0) == in.rows, in.op, ": grad_output must have shape (", in.rows,
               ",), got ", shape_of(grad));
      tensor = grad.scalar_type() == in.acc ? grad : converted(grad, in.acc);
      per_row = tensor->const_data_ptr();
      stride = tensor->stride(0);
    } else {
      SF_CHECK(grad.numel() == 1, in.op, ": grad_output must have one element, got shape ", shape_of(grad));
      tensor = flat(grad, in.acc);
      scalar = tensor->const_data_ptr();
    }
  }
};

struct Counts {
  Tensor counts, rows;
  Chunk chunk(int64_t first, int64_t size) const {
    return {static_cast<const double*>(counts.const_data_ptr()), static_cast<const int32_t*>(rows.const_data_ptr()),
            first, size};
  }
};

template <class Backend>
Counts count(Backend& backend, const LossInputs& in, const Upstream& upstream) {
  Counts out{new_empty(in.target, {kCountSlots}, ScalarType::Double), new_empty(in.target, {in.rows}, ScalarType::Int)};
  Tensor scratch = new_bytes(in.target, Backend::count_scratch_bytes(in.rows, in.num_classes));
  CountParams p{};
  p.target = in.targets();
  p.rows = in.rows;
  p.sequence = in.sequence;
  p.shift = in.shift;
  p.num_classes = in.num_classes;
  p.ignore_index = in.ignore_index;
  p.weight = data_or_null(in.weight);
  p.token_weight = data_or_null(in.token_weight);
  p.upstream = upstream.per_row;
  p.upstream_stride = upstream.stride;
  p.num_items = static_cast<const double*>(data_or_null(in.num_items));
  p.reduction = in.options.reduction;
  p.acc = dtype_of(in.acc);
  p.counts = static_cast<double*>(out.counts.mutable_data_ptr());
  p.row_index = static_cast<int32_t*>(out.rows.mutable_data_ptr());
  p.scratch = scratch.mutable_data_ptr();
  backend.count(p);
  return out;
}

// The parts of RowParams that do not depend on the logits.
inline RowParams row_params(const LossInputs& in, const Upstream& upstream) {
  RowParams p{};
  p.options = in.options;
  p.num_classes = p.total_classes = in.num_classes;
  p.target = in.targets();
  p.shift = in.shift;
  p.weight = data_or_null(in.weight);
  p.token_weight = data_or_null(in.token_weight);
  p.upstream = upstream.per_row;
  p.upstream_stride = upstream.stride;
  p.acc = dtype_of(in.acc);
  return p;
}

// What a forward gives besides gradients.
struct LossOutputs {
  Tensor loss, z_loss, token_accuracy, predicted_tokens, logsumexp;
  Tensor ce, z, correct;  // per row

  LossOutputs(const LossInputs& in, const Tensor& like, bool need_token_accuracy, bool need_predicted_tokens,
              bool need_logsumexp)
      : loss(in.is_none() ? new_empty(like, {in.rows}, in.acc) : new_empty(like, {}, in.acc)),
        z_loss(in.is_none() ? new_empty(like, {in.rows}, in.acc) : new_empty(like, {}, in.acc)),
        token_accuracy(!need_token_accuracy ? new_empty(like, {0}, ScalarType::Float)
                       : in.is_none()       ? new_empty(like, {in.rows}, ScalarType::Float)
                                            : new_empty(like, {}, ScalarType::Float)),
        predicted_tokens(new_empty(like, {need_predicted_tokens ? in.rows : 0}, ScalarType::Long)),
        logsumexp(new_empty(like, {need_logsumexp ? in.rows : 0}, in.acc)),
        ce(in.is_none() ? loss : new_empty(like, {in.rows}, in.acc)),
        z(in.is_none() ? z_loss : new_empty(like, {in.rows}, in.acc)),
        correct(need_token_accuracy && !in.is_none() ? new_empty(like, {in.rows}, ScalarType::Float) : token_accuracy),
        accuracy_(need_token_accuracy),
        predicted_(need_predicted_tokens),
        logsumexp_(need_logsumexp) {}

  void attach(RowParams& p) const {
    p.ce = ce.mutable_data_ptr();
    p.z = z.mutable_data_ptr();
    p.correct = accuracy_ ? static_cast<float*>(correct.mutable_data_ptr()) : nullptr;
    p.predicted = predicted_ ? static_cast<int64_t*>(predicted_tokens.mutable_data_ptr()) : nullptr;
    p.logsumexp = logsumexp_ ? logsumexp.mutable_data_ptr() : nullptr;
  }

  bool wants_argmax() const { return accuracy_ || predicted_; }

  template <class Backend>
  void reduce(Backend& backend, const LossInputs& in, const Counts& counts) const {
    ReduceParams p{};
    p.counts = static_cast<const double*>(counts.counts.const_data_ptr());
    p.reduction = in.options.reduction;
    p.rows = in.rows;
    p.ce = ce.const_data_ptr();
    p.z = z.const_data_ptr();
    p.correct = accuracy_ && !in.is_none() ? static_cast<const float*>(correct.const_data_ptr()) : nullptr;
    p.acc = dtype_of(in.acc);
    p.loss = loss.mutable_data_ptr();
    p.z_loss = z_loss.mutable_data_ptr();
    p.accuracy = accuracy_ && !in.is_none() ? static_cast<float*>(token_accuracy.mutable_data_ptr()) : nullptr;
    backend.reduce(p);
  }

 private:
  bool accuracy_, predicted_, logsumexp_;
};

}  // namespace syncfree
