// The few things that the ops need of torch's stable ABI, with the checks that every op shares.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdio>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "params.h"

namespace syncfree {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Pieces of an error text. No streams: a compiler that links its own libstdc++ into a library would bring a second set
// of locales.
inline std::string text_of(const std::string& text) {
  return text;
}
inline std::string text_of(const char* text) {
  return text;
}
inline std::string text_of(double number) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%g", number);
  return digits;
}
template <class Integer, class = std::enable_if_t<std::is_integral_v<Integer>>>
inline std::string text_of(Integer number) {
  return std::to_string(number);
}

template <class... Parts>
inline std::string message(const Parts&... parts) {
  std::string text;
  ((text += text_of(parts)), ...);
  return text;
}

// std::invalid_argument reaches Python as ValueError. Message: op, argument, expected, got; built only when it is
// needed.
#define SF_CHECK(ok, ...)                                                                                              \
  do {                                                                                                                 \
    if (!(ok)) throw std::invalid_argument(::syncfree::message(__VA_ARGS__));                                          \
  } while (0)

// A `str` argument. torch's own conversion to std::string, compiled from the headers of 2.11 to 2.13, leaks a string in
// each call.
struct Text {
  std::string value;
};

// Of a call through torch's C shims, whose checking macro has another name in each release.
inline void check_shim(int32_t error, const char* call) {
  if (error != 0)
    throw std::runtime_error(std::string("syncfree: ") + call + " failed; torch has printed why on stderr");
}

inline std::string shape_of(const Tensor& t) {
  std::string text = "(";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i ? ", " : "") + std::to_string(t.size(i));
  return text + (t.dim() == 1 ? ",)" : ")");
}

inline const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Bool:
      return "bool";
    default:
      return "another dtype";
  }
}

inline bool is_floating(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::Double || type == ScalarType::Half ||
         type == ScalarType::BFloat16;
}

inline DType dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::Double:
      return DType::f64;
    case ScalarType::BFloat16:
      return DType::bf16;
    default:
      return DType::f16;
  }
}

inline int64_t size_of(DType type) {
  return type == DType::f64 ? 8 : type == DType::f32 ? 4 : 2;
}

// Of every dtype that tensors are made with here.
inline int64_t bytes_of(ScalarType type) {
  switch (type) {
    case ScalarType::Double:
    case ScalarType::Long:
      return 8;
    case ScalarType::Float:
    case ScalarType::Int:
      return 4;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    default:
      return 1;
  }
}

// Products of double are summed in double, all others in float.
inline ScalarType acc_type(ScalarType compute) {
  return compute == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline int32_t dtype_code(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return aoti_torch_dtype_float32();
    case ScalarType::Double:
      return aoti_torch_dtype_float64();
    case ScalarType::Half:
      return aoti_torch_dtype_float16();
    case ScalarType::BFloat16:
      return aoti_torch_dtype_bfloat16();
    case ScalarType::Long:
      return aoti_torch_dtype_int64();
    case ScalarType::Int:
      return aoti_torch_dtype_int32();
    case ScalarType::Bool:
      return aoti_torch_dtype_bool();
    default:
      return aoti_torch_dtype_uint8();
  }
}

// torch's shims say that they failed, not why. syncfree_ext/_dispatch.py reads this text, and finds out.
[[noreturn]] inline void throw_allocation(const Tensor& like, int64_t bytes) {
  throw std::runtime_error(message("syncfree: an allocation of ", bytes, " bytes failed, probably: ",
                                   like.is_cpu() ? "host" : "CUDA", " out of memory. torch has printed why on stderr"));
}

// Contiguous, on the device of `like`. Through the shim, since a call by name through the dispatcher costs several
// times the allocation.
inline Tensor new_empty(const Tensor& like, const int64_t* size, int64_t dims, ScalarType type) {
  constexpr int64_t kMaxDims = 64;  // torch's own bound
  int64_t strides[kMaxDims], step = 1;
  SF_CHECK(dims <= kMaxDims, "syncfree: expected at most ", kMaxDims, " dimensions, got ", dims);
  for (int64_t i = dims; i-- > 0;) {
    strides[i] = step;
    step *= std::max<int64_t>(size[i], 1);
  }
  int32_t device_type = 0;
  check_shim(aoti_torch_get_device_type(like.get(), &device_type), "aoti_torch_get_device_type");
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(dims, size, strides, dtype_code(type), device_type, like.get_device_index(), &handle))
    throw_allocation(like, step * bytes_of(type));
  return Tensor(handle);
}

inline Tensor new_empty(const Tensor& like, std::initializer_list<int64_t> size, ScalarType type) {
  return new_empty(like, size.begin(), int64_t(size.size()), type);
}

inline Tensor new_bytes(const Tensor& like, int64_t bytes) {
  return new_empty(like, {bytes}, ScalarType::Byte);
}

// A copy in another dtype; a contiguous copy. What can fail about them is the memory for it.
inline Tensor converted(const Tensor& t, ScalarType type) try {
  return torch::stable::to(t, type);
} catch (const std::runtime_error&) {
  throw_allocation(t, t.numel() * bytes_of(type));
}

inline Tensor compacted(const Tensor& t) try {
  return torch::stable::contiguous(t);
} catch (const std::runtime_error&) {
  throw_allocation(t, t.numel() * bytes_of(t.scalar_type()));
}

// Contiguous and of that dtype; the tensor itself where it is both already.
inline Tensor as_contiguous(const Tensor& t, ScalarType type) {
  const Tensor typed = t.scalar_type() == type ? t : converted(t, type);
  return typed.is_contiguous() ? typed : compacted(typed);
}

// The same in one dimension.
inline Tensor flat(const Tensor& t, ScalarType type) {
  const Tensor whole = as_contiguous(t, type);
  if (whole.dim() == 1) return whole;
  const int64_t size[1] = {whole.numel()};
  return torch::stable::reshape(whole, torch::headeronly::IntHeaderOnlyArrayRef(size, 1));
}

// A matrix whose rows are contiguous; the tensor itself where they are.
inline Tensor with_contiguous_rows(const Tensor& t) {
  const bool rows = (t.size(1) <= 1 || t.stride(1) == 1) && (t.size(0) <= 1 || t.stride(0) >= t.size(1));
  return rows ? t : compacted(t);
}

inline int64_t pitch_of(const Tensor& t) {
  return t.size(0) <= 1 ? t.size(1) : t.stride(0);
}

inline const void* data_or_null(const OptionalTensor& t) {
  return t ? t->const_data_ptr() : nullptr;
}

inline void check_same_device(const char* op, const char* name, const Tensor& t, const Tensor& like) {
  SF_CHECK(t.is_cuda() == like.is_cuda() && t.is_cpu() == like.is_cpu() &&
               (like.is_cpu() || t.get_device_index() == like.get_device_index()),
           op, ": ", name, " is on another device than the first argument");
}

inline void check_floating(const char* op, const char* name, const Tensor& t) {
  SF_CHECK(is_floating(t.scalar_type()), op, ": ", name, " must be float64, float32, bfloat16 or float16, got ",
           name_of(t.scalar_type()));
}

}  // namespace syncfree

namespace torch::stable::detail {

template <>
struct ToImpl<syncfree::Text> {
  static syncfree::Text call(StableIValue value, uint64_t, bool) {
    const StringHandle handle = to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    syncfree::check_shim(torch_string_length(handle, &length), "torch_string_length");
    syncfree::check_shim(torch_string_c_str(handle, &data), "torch_string_c_str");
    syncfree::Text text{std::string(data, length)};
    syncfree::check_shim(torch_delete_string(handle), "torch_delete_string");
    return text;
  }
};

}  // namespace torch::stable::detail
