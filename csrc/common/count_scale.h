// The two small ops: target statistics, and the scale that is skipped where it is 1.
#pragma once

#include <tuple>
#include <vector>

#include "loss_inputs.h"

namespace syncfree {

template <class Backend>
std::tuple<Tensor, Tensor> count_targets(Tensor target, int64_t num_classes, OptionalTensor weight,
                                         OptionalTensor token_weight, OptionalTensor num_items, Text reduction,
                                         int64_t ignore_index, int64_t shift) {
  Backend backend(target);
  const ScalarType acc =
      weight && weight->scalar_type() == ScalarType::Double && target.is_cpu() ? ScalarType::Double : ScalarType::Float;
  const LossInputs in("syncfree::count_targets", target, acc, target.numel(), num_classes, target, weight, token_weight,
                      num_items, reduction, ignore_index, 0.0, std::nullopt, false, 1.0, 0.0, std::nullopt,
                      std::nullopt, shift);
  Counts out = count(backend, in, Upstream());
  return {out.counts, out.rows};
}

template <class Backend>
void scale_unless_one_(std::vector<Tensor> grads, Tensor scale,
                       std::optional<std::vector<Tensor>> optional_row_scales) {
  const std::vector<Tensor> row_scales = optional_row_scales.value_or(std::vector<Tensor>());
  constexpr const char* op = "syncfree::scale_unless_one_";
  check_floating(op, "scale", scale);
  SF_CHECK(scale.numel() == 1, op, ": scale must have one element, got shape ", shape_of(scale));
  SF_CHECK(row_scales.empty() || row_scales.size() == grads.size(), op,
           ": row_scales must be empty or have one entry for each of ", grads.size(), " grads, got ",
           row_scales.size());
  Backend backend(scale);
  for (size_t first = 0; first < grads.size(); first += kMaxScaleTensors) {
    ScaleParams p{};
    p.scale = scale.const_data_ptr();
    p.scale_dtype = dtype_of(scale.scalar_type());
    for (size_t i = first; i < grads.size() && i < first + kMaxScaleTensors; ++i) {
      const Tensor& g = grads[i];
      check_floating(op, "grads", g);
      check_same_device(op, "grads", g, scale);
      SF_CHECK(g.is_contiguous(), op, ": grads[", i, "] must be contiguous");
      if (g.numel() == 0) continue;
      const float* row_scale = nullptr;
      const int64_t rows = g.dim() >= 1 ? g.size(0) : 1;
      if (!row_scales.empty() && row_scales[i].numel() != 0) {
        const Tensor& r = row_scales[i];
        check_same_device(op, "row_scales", r, scale);
        SF_CHECK(r.scalar_type() == ScalarType::Float && r.is_contiguous() && r.numel() == rows, op, ": row_scales[", i,
                 "] must be contiguous float32 with ", rows, " elements, got ", shape_of(r), " of ",
                 name_of(r.scalar_type()));
        row_scale = static_cast<const float*>(r.const_data_ptr());
      }
      p.items[p.count++] = {g.mutable_data_ptr(), dtype_of(g.scalar_type()), rows, g.numel() / rows, row_scale};
    }
    if (p.count) backend.scale(p);
  }
}

}  // namespace syncfree
