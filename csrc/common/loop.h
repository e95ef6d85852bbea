// The ops of the training loop: scalars stored where the host can see them, and selections of a fixed size.
#pragma once

#include <tuple>
#include <vector>

#include "loop_params.h"
#include "tensor.h"

namespace syncfree {

inline ScalarKind scalar_kind_of(const char* op, const Tensor& t, size_t index) {
  switch (t.scalar_type()) {
    case ScalarType::Double:
      return ScalarKind::f64;
    case ScalarType::Float:
      return ScalarKind::f32;
    case ScalarType::BFloat16:
      return ScalarKind::bf16;
    case ScalarType::Half:
      return ScalarKind::f16;
    case ScalarType::Long:
      return ScalarKind::i64;
    case ScalarType::Int:
      return ScalarKind::i32;
    case ScalarType::Short:
      return ScalarKind::i16;
    case ScalarType::Char:
      return ScalarKind::i8;
    case ScalarType::Byte:
      return ScalarKind::u8;
    case ScalarType::Bool:
      return ScalarKind::b8;
    default:
      throw std::invalid_argument(message(op, ": values[", index,
                                          "] must be float64, float32, bfloat16, float16, int64, int32, int16, int8, "
                                          "uint8 or bool, got another dtype"));
  }
}

inline bool is_floating(ScalarKind kind) {
  return kind <= ScalarKind::f16;
}

inline void check_slots(const char* op, const Tensor& slots) {
  SF_CHECK(slots.scalar_type() == ScalarType::Long && slots.dim() == 2 && slots.is_contiguous() && slots.size(0) > 0 &&
               slots.size(1) >= kSlotColumns,
           op, ": slots must be contiguous int64 of shape (rows, ", int(kSlotColumns), " + columns), got ",
           shape_of(slots), " of ", name_of(slots.scalar_type()));
}

// All values of a ticket, in as many launches as they need.
template <class Backend>
void publish_items(Backend& backend, PublishParams& p, const std::vector<PublishParams::Item>& items) {
  p.first = true;
  for (size_t start = 0; start < items.size() || p.first;) {
    p.count = int32_t(std::min<size_t>(items.size() - start, kMaxPublishItems));
    std::copy_n(items.begin() + start, p.count, p.items);
    start += p.count;
    p.last = start == items.size();
    backend.publish(p);
    p.first = false;
  }
}

template <class Backend>
void publish_(Tensor slots, std::vector<Tensor> values, std::vector<int64_t> columns, std::vector<double> constants,
              int64_t first_integer_column, int64_t ticket, OptionalTensor counters, int64_t origin) {
  constexpr const char* op = "syncfree::publish_";
  check_slots(op, slots);
  const size_t total = values.size() + constants.size();
  const int64_t num_columns = slots.size(1) - kSlotColumns;
  SF_CHECK(columns.size() == total, op, ": columns must have one entry for each of ", values.size(), " values and ",
           constants.size(), " constants, got ", columns.size());
  SF_CHECK(first_integer_column >= 0, op, ": first_integer_column must not be negative, got ", first_integer_column);
  SF_CHECK(counters || ticket >= 1, op, ": ticket must be at least 1, got ", ticket);
  SF_CHECK(origin >= 0, op, ": origin must not be negative, got ", origin);
  if (counters) {
    check_same_device(op, "counters", *counters, slots);
    SF_CHECK(counters->scalar_type() == ScalarType::Long && counters->is_contiguous() && counters->dim() == 1 &&
                 counters->numel() - 1 > origin,
             op, ": counters must be contiguous int64 with an entry for origin ", origin, " behind the first, got ",
             shape_of(*counters), " of ", name_of(counters->scalar_type()));
  }
  PublishParams p{};
  p.slots = static_cast<int64_t*>(slots.mutable_data_ptr());
  p.rows = slots.size(0);
  p.width = slots.size(1);
  p.ticket = ticket;
  p.counters = counters ? static_cast<int64_t*>(counters->mutable_data_ptr()) : nullptr;
  p.origin = origin;

  // All is checked before the first launch: a slot is written as a whole or not at all.
  std::vector<PublishParams::Item> items(total);
  for (size_t i = 0; i < total; ++i) {
    SF_CHECK(columns[i] >= 0 && columns[i] < num_columns, op, ": columns[", i, "] must be in [0, ", num_columns,
             "), got ", columns[i]);
    PublishParams::Item& item = items[i];
    item = {};
    item.column = int32_t(columns[i]);
    item.to_integer = columns[i] >= first_integer_column;
    if (i >= values.size()) {
      item.constant = constants[i - values.size()];
      SF_CHECK(!item.to_integer, op, ": constants must be for float64 columns, got column ", columns[i]);
      continue;
    }
    const Tensor& value = values[i];
    check_same_device(op, message("values[", i, "]").c_str(), value, slots);
    SF_CHECK(value.numel() == 1, op, ": values[", i, "] must have one element, got shape ", shape_of(value));
    item.kind = scalar_kind_of(op, value, i);
    SF_CHECK(!item.to_integer || !is_floating(item.kind), op, ": values[", i,
             "] must be of an integer dtype for an int64 column, got ", name_of(value.scalar_type()));
    item.source = value.const_data_ptr();
  }
  Backend backend(slots);
  publish_items(backend, p, items);
}

// The row of a ticket, copied in the order that makes a torn copy visible: its first two entries then differ.
inline void copy_row(const int64_t* slots, int64_t rows, int64_t width, int64_t ticket, int64_t* copy) {
  const int64_t* row = slots + (ticket - 1) % rows * width;
  copy[kSlotEnd] = __atomic_load_n(row + kSlotEnd, __ATOMIC_ACQUIRE);
  for (int64_t i = kSlotOrigin; i < width; ++i) copy[i] = __atomic_load_n(row + i, __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  copy[kSlotBegin] = __atomic_load_n(row + kSlotBegin, __ATOMIC_RELAXED);
}

inline Tensor read_slot(Tensor slots, int64_t ticket) {
  constexpr const char* op = "syncfree::read_slot";
  check_slots(op, slots);
  SF_CHECK(ticket >= 1, op, ": ticket must be at least 1, got ", ticket);
  const int64_t width = slots.size(1);
  Tensor out = new_empty(slots, {width}, ScalarType::Long);
  copy_row(static_cast<const int64_t*>(slots.const_data_ptr()), slots.size(0), width, ticket,
           static_cast<int64_t*>(out.mutable_data_ptr()));
  return out;
}

inline KeyKind key_kind_of(ScalarType type) {
  switch (type) {
    case ScalarType::Double:
      return KeyKind::f64;
    case ScalarType::BFloat16:
      return KeyKind::bf16;
    case ScalarType::Half:
      return KeyKind::f16;
    default:
      return KeyKind::f32;
  }
}

inline const int64_t* per_row(const char* op, const char* name, const OptionalTensor& t, const Tensor& mask,
                              int64_t rows) {
  if (!t) return nullptr;
  check_same_device(op, name, *t, mask);
  SF_CHECK(t->scalar_type() == ScalarType::Long && t->is_contiguous() && t->numel() == rows, op, ": ", name,
           " must be contiguous int64 with one entry for each of ", rows, " rows, got ", shape_of(*t), " of ",
           name_of(t->scalar_type()));
  return static_cast<const int64_t*>(t->const_data_ptr());
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor> masked_indices(Tensor mask, int64_t size, OptionalTensor keys,
                                                  std::optional<int64_t> seed, OptionalTensor row_ids,
                                                  OptionalTensor limit, std::optional<int64_t> max_kept,
                                                  int64_t fill_value) {
  constexpr const char* op = "syncfree::masked_indices";
  SF_CHECK(mask.scalar_type() == ScalarType::Bool && mask.dim() >= 1, op,
           ": mask must be bool with at least one dimension, got ", shape_of(mask), " of ",
           name_of(mask.scalar_type()));
  SF_CHECK(size >= 0, op, ": size must not be negative, got ", size);
  SF_CHECK(!max_kept || *max_kept >= 0, op, ": max_kept must not be negative, got ", max_kept.value_or(0));
  SF_CHECK(!keys || !seed, op, ": keys and seed must not both be given");
  SF_CHECK(!row_ids || seed, op, ": row_ids must come with a seed");
  const int64_t dims = mask.dim(), length = mask.size(dims - 1);
  SF_CHECK(length < int64_t(1) << 32, op, ": mask must have fewer than 2^32 columns, got ", length);
  std::vector<int64_t> shape(dims);
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < dims; ++i) rows *= shape[i] = mask.size(i);
  shape[dims - 1] = size;
  SF_CHECK(size <= INT64_MAX / 8 / std::max<int64_t>(rows, 1), op, ": size must leave an address for each of ", rows,
           " rows, got ", size);
  if (keys) {
    check_same_device(op, "keys", *keys, mask);
    check_floating(op, "keys", *keys);
    bool same = keys->dim() == dims;
    for (int64_t i = 0; same && i < dims; ++i) same = keys->size(i) == mask.size(i);
    SF_CHECK(same, op, ": keys must have the shape of mask, ", shape_of(mask), ", got ", shape_of(*keys));
  }
  const Tensor flags = mask.is_contiguous() ? mask : compacted(mask);
  const OptionalTensor dense_keys = keys ? OptionalTensor(as_contiguous(*keys, keys->scalar_type())) : OptionalTensor();

  Backend backend(mask);
  Tensor indices = new_empty(mask, shape.data(), dims, ScalarType::Long);
  Tensor valid = new_empty(mask, shape.data(), dims, ScalarType::Bool);
  Tensor count = new_empty(mask, shape.data(), dims - 1, ScalarType::Long);
  SelectParams p{};
  p.mask = static_cast<const uint8_t*>(flags.const_data_ptr());
  p.rows = rows;
  p.length = length;
  p.size = size;
  p.max_kept = max_kept ? std::min(*max_kept, size) : size;
  p.limit = per_row(op, "limit", limit, mask, rows);
  p.key_kind = keys ? key_kind_of(keys->scalar_type()) : seed ? KeyKind::philox : KeyKind::none;
  p.keys = data_or_null(dense_keys);
  p.seed = uint64_t(seed.value_or(0));
  p.row_ids = per_row(op, "row_ids", row_ids, mask, rows);
  p.fill_value = fill_value;
  p.indices = static_cast<int64_t*>(indices.mutable_data_ptr());
  p.valid = static_cast<bool*>(valid.mutable_data_ptr());
  p.count = static_cast<int64_t*>(count.mutable_data_ptr());
  if (rows) backend.select(p);
  return {indices, valid, count};
}

}  // namespace syncfree
