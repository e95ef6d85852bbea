// Matrix products through the cuBLAS that torch has loaded, on torch's own handle: its stream, workspace and TF32
// setting.
//
// The function is looked up in the running process. Linking it would tie the wheel to one soname, and torch always has
// it.
#include <dlfcn.h>
#include <library_types.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>

#include "../backend.h"

namespace syncfree {
namespace {

// Of cublas_api.h, whose values are part of cuBLAS's ABI.
enum Operation : int { kOpN = 0, kOpT = 1 };
enum PointerMode : int { kPointerHost = 0, kPointerDevice = 1 };
constexpr int kCompute32F = 68;
constexpr int kGemmDefault = -1;

using Handle = void*;
using GemmEx = int (*)(Handle, Operation, Operation, int, int, int, const void*, const void*, cudaDataType, int,
                       const void*, cudaDataType, int, const void*, void*, cudaDataType, int, int, int);
using SetPointerMode = int (*)(Handle, PointerMode);

struct Cublas {
  GemmEx gemm_ex = nullptr;
  SetPointerMode set_pointer_mode = nullptr;

  Cublas() {
    void* library = RTLD_DEFAULT;
    if (!dlsym(library, "cublasGemmEx")) {
      for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so.11", "libcublas.so"})
        if ((library = dlopen(name, RTLD_NOLOAD | RTLD_LAZY))) break;
      if (!library) return;
    }
    gemm_ex = reinterpret_cast<GemmEx>(dlsym(library, "cublasGemmEx"));
    set_pointer_mode = reinterpret_cast<SetPointerMode>(dlsym(library, "cublasSetPointerMode_v2"));
  }
};

cudaDataType type_of(DType type) {
  switch (type) {
    case DType::f32:
      return CUDA_R_32F;
    case DType::f64:
      return CUDA_R_64F;
    case DType::bf16:
      return CUDA_R_16BF;
    default:
      return CUDA_R_16F;
  }
}

}  // namespace

void CudaBackend::gemm(const GemmParams& p) {
  static const Cublas cublas;
  if (!cublas.gemm_ex || !cublas.set_pointer_mode)
    throw std::runtime_error("syncfree: cublasGemmEx was not found in this process; torch has loaded no cuBLAS");
  if (p.acc != DType::f32)
    throw std::invalid_argument(
        "syncfree: float64 runs on the CPU; expected float32, bfloat16 or float16 on CUDA, got float64");
  for (int64_t size : {p.m, p.n, p.k, p.lda, p.ldb, p.ldc})
    if (size > INT32_MAX) throw std::invalid_argument("syncfree: a matrix dimension is larger than 2^31 - 1");

  Handle handle = nullptr;
  check_shim(torch_get_current_cuda_blas_handle(&handle), "torch_get_current_cuda_blas_handle");
  static const float one = 1.f, zero = 0.f;
  const float* on_device = static_cast<const float*>(p.alpha);
  const int64_t parts = p.parts > 1 ? p.parts : 1, part = (p.k + parts - 1) / parts, element = size_of(p.ab_dtype);
  if (on_device) cublas.set_pointer_mode(handle, kPointerDevice);
  int status = 0;
  for (int64_t begin = 0; begin < p.k && status == 0; begin += part) {
    const int64_t k = std::min(part, p.k - begin);
    const bool add = p.accumulate || begin > 0;
    const void* alpha = on_device ? on_device : &one;
    const void* beta = on_device ? on_device + (add ? 2 : 1) : add ? &one : &zero;
    const void* a = static_cast<const char*>(p.a) + begin * element * (p.transpose_a ? p.lda : 1);
    const void* b = static_cast<const char*>(p.b) + begin * element * (p.transpose_b ? 1 : p.ldb);
    // Row-major C = A B is column-major C^T = B^T A^T.
    status = cublas.gemm_ex(handle, p.transpose_b ? kOpT : kOpN, p.transpose_a ? kOpT : kOpN, int(p.n), int(p.m),
                            int(k), alpha, b, type_of(p.ab_dtype), int(p.ldb), a, type_of(p.ab_dtype), int(p.lda), beta,
                            p.c, type_of(p.c_dtype), int(p.ldc), kCompute32F, kGemmDefault);
  }
  if (on_device) cublas.set_pointer_mode(handle, kPointerHost);
  if (status != 0)
    throw std::runtime_error("syncfree: cublasGemmEx failed with status " + std::to_string(status) + " for m=" +
                             std::to_string(p.m) + " n=" + std::to_string(p.n) + " k=" + std::to_string(p.k));
}

}  // namespace syncfree
