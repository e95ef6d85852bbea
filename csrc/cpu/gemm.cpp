// Matrix products through the BLAS that torch has loaded.
//
// C = alpha op(A) op(B) + C, row-major. fp32 and fp64 go to sgemm/dgemm; bf16 and f16 to MKL's mixed products, which
// take 16-bit operands and give fp32: the logits never pass through 16 bits. Symbols are looked up once, at run time;
// where one is missing the product goes through aten::mm on operands widened to the type of the sums. C in bf16 or f16
// is computed a block of rows at a time in fp32 and rounded once.
#include <dlfcn.h>

#include <array>
#include <memory>

#include "../common/chunk_plan.h"
#include "backend.h"
#include "numbers.h"

namespace syncfree {
namespace {

using torch::headeronly::IntHeaderOnlyArrayRef;

// Column-major BLAS with 64-bit integers, then with 32-bit ones.
template <class Int, class In, class T>
using Gemm = void (*)(const char*, const char*, const Int*, const Int*, const Int*, const T*, const In*, const Int*,
                      const In*, const Int*, const T*, T*, const Int*);

template <class In, class T>
struct GemmSymbols {
  Gemm<int64_t, In, T> wide = nullptr;
  Gemm<int32_t, In, T> narrow = nullptr;
};

// SYNCFREE_NO_BLAS builds what a torch without these symbols would run, for tests of it.
void* find_symbol([[maybe_unused]] const char* name) {
#if defined(SYNCFREE_NO_BLAS)
  return nullptr;
#else
  static void* const torch_library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  void* symbol = torch_library ? dlsym(torch_library, name) : nullptr;
  return symbol ? symbol : dlsym(RTLD_DEFAULT, name);
#endif
}

template <class In, class T>
GemmSymbols<In, T> find_gemm(const char* wide, const char* narrow) {
  return {reinterpret_cast<Gemm<int64_t, In, T>>(find_symbol(wide)),
          reinterpret_cast<Gemm<int32_t, In, T>>(find_symbol(narrow))};
}

template <class In, class T>
const GemmSymbols<In, T>& symbols() {
  static const GemmSymbols<In, T> found = [] {
    if constexpr (std::is_same_v<In, double>)
      return find_gemm<In, T>("dgemm_64_", "dgemm_");
    else if constexpr (std::is_same_v<In, float>)
      return find_gemm<In, T>("sgemm_64_", "sgemm_");
    else if constexpr (std::is_same_v<In, Bf16>)
      return find_gemm<In, T>("gemm_bf16bf16f32_64_", "gemm_bf16bf16f32_");
    else
      return find_gemm<In, T>("gemm_f16f16f32_64_", "gemm_f16f16f32_");
  }();
  return found;
}

// While it lives, MKL's calls on this thread use this thread alone: inside a parallel loop MKL would split the work for
// a team that it does not get there. Other BLAS libraries see the loop for themselves.
class OneThread {
 public:
  OneThread() : before_(set_threads() ? set_threads()(1) : 0) {}
  ~OneThread() {
    if (set_threads()) set_threads()(before_);
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  using SetThreads = int (*)(int);
  static SetThreads set_threads() {
    static const SetThreads found = reinterpret_cast<SetThreads>(find_symbol("MKL_Set_Num_Threads_Local"));
    return found;
  }
  int before_;
};

// Row-major operands are the transposes of column-major ones, so the product is C^T = op(B)^T op(A)^T.
template <class Int, class In, class T>
void call(Gemm<Int, In, T> gemm, const GemmParams& p, const In* a, const In* b, T alpha, T beta, T* c, int64_t ldc) {
  const char ta = p.transpose_a ? 'T' : 'N', tb = p.transpose_b ? 'T' : 'N';
  const Int m = Int(p.m), n = Int(p.n), k = Int(p.k), lda = Int(p.lda), ldb = Int(p.ldb), ld = Int(ldc);
  gemm(&tb, &ta, &n, &m, &k, &alpha, b, &ldb, a, &lda, &beta, c, &ld);
}

Tensor matrix(const void* data, int64_t rows, int64_t columns, int64_t pitch, ScalarType type) {
  const int64_t sizes[2] = {rows, columns}, strides[2] = {pitch, 1};
  return torch::stable::from_blob(const_cast<void*>(data), IntHeaderOnlyArrayRef(sizes, 2),
                                  IntHeaderOnlyArrayRef(strides, 2),
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU), type);
}

template <class In, class T>
std::unique_ptr<T[]> widened(const In* in, int64_t rows, int64_t columns, int64_t pitch) {
  std::unique_ptr<T[]> out(new T[size_t(rows * columns)]);
  parallel(rows, columns, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t j = 0; j < columns; ++j) out[r * columns + j] = T(widen(in[r * pitch + j]));
    }
  });
  return out;
}

template <class T>
void multiply_by_aten(const GemmParams& p, const T* a, const T* b, T alpha, bool accumulate, T* c, int64_t ldc) {
  constexpr ScalarType type = std::is_same_v<T, double> ? ScalarType::Double : ScalarType::Float;
  const Tensor left = p.transpose_a ? torch::stable::transpose(matrix(a, p.k, p.m, p.lda, type), 0, 1)
                                    : matrix(a, p.m, p.k, p.lda, type);
  const Tensor right = p.transpose_b ? torch::stable::transpose(matrix(b, p.n, p.k, p.ldb, type), 0, 1)
                                     : matrix(b, p.k, p.n, p.ldb, type);
  const bool direct = !accumulate && alpha == T(1);
  std::unique_ptr<T[]> slab(direct ? nullptr : new T[size_t(p.m * p.n)]);
  const Tensor out = direct ? matrix(c, p.m, p.n, ldc, type) : matrix(slab.get(), p.m, p.n, p.n, type);
  std::array<StableIValue, 3> stack{torch::stable::detail::from(left), torch::stable::detail::from(right),
                                    torch::stable::detail::from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // owns what mm returned
  if (direct) return;
  parallel(p.m, p.n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < p.n; ++j)
        c[i * ldc + j] = (accumulate ? c[i * ldc + j] : T(0)) + alpha * slab[i * p.n + j];
    }
  });
}

template <class In, class T>
bool has_blas(const GemmParams& p) {
  const GemmSymbols<In, T>& found = symbols<In, T>();
  return found.wide || (found.narrow && std::max({p.m, p.n, p.k, p.lda, p.ldb, p.ldc}) <= INT32_MAX);
}

// c = alpha op(A) op(B) + c or, where C is fresh, without it. MKL's mixed products write a fresh C at half the speed at
// which they add to one (AMX, 2024.2: 226 against 129 ms for 67 GFLOP), so theirs is zeroed first, while it is small
// enough to stay in the cache.
template <class In, class T>
void product(const GemmParams& p, const In* a, const In* b, T alpha, bool accumulate, T* c, int64_t ldc) {
  if (!accumulate && (p.k == 0 || !std::is_same_v<In, T>)) {
    parallel(p.m, p.n, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) std::fill_n(c + i * ldc, p.n, T(0));
    });
    accumulate = true;
  }
  if (p.k == 0) return;
  if (has_blas<In, T>(p)) {
    const GemmSymbols<In, T>& found = symbols<In, T>();
    const T beta = accumulate ? T(1) : T(0);
    return found.wide ? call(found.wide, p, a, b, alpha, beta, c, ldc)
                      : call(found.narrow, p, a, b, alpha, beta, c, ldc);
  }
  if constexpr (std::is_same_v<In, T>) multiply_by_aten(p, a, b, alpha, accumulate, c, ldc);
}

// One panel of C; p is the product it takes.
template <class In, class T, class Out>
void multiply_panel(const GemmParams& p, const In* a, const In* b, T alpha, Out* c) {
  if constexpr (std::is_same_v<T, Out>) {
    product<In, T>(p, a, b, alpha, p.accumulate, c, p.ldc);
  } else {
    const std::unique_ptr<T[]> sum(new T[size_t(p.m * p.n)]);
    product<In, T>(p, a, b, alpha, false, sum.get(), p.n);
    parallel(p.m, p.n, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T* from = sum.get() + i * p.n;
        Out* to = c + i * p.ldc;
        if (p.accumulate) {
          for (int64_t j = 0; j < p.n; ++j) to[j] = narrow<Out>(T(widen(to[j])) + from[j]);
        } else {
          for (int64_t j = 0; j < p.n; ++j) to[j] = narrow<Out>(from[j]);
        }
      }
    });
  }
}

// Cuts the longer side of C into panels that stay in the second-level cache, each the work of one thread: no barriers
// but the last, and values that do not depend on the number of threads. Where there are too few panels for that, BLAS
// gets C whole and its own threads.
template <class In, class T, class Out>
void multiply(const GemmParams& p, const In* a, const In* b, T alpha, Out* c) {
  constexpr int64_t kPanelElements = 1 << 18, kPanelsPerThread = 4;
  const bool blas = has_blas<In, T>(p), columns = p.n >= p.m && blas;
  const int64_t length = columns ? p.n : p.m, across = columns ? p.m : p.n;
  const int64_t panel = round_up(std::clamp<int64_t>(kPanelElements / across, 64, 1024), 64),
                panels = ceil_div(length, panel);
  const auto run_panels = [&](int64_t first, int64_t size) {
    GemmParams part = p;
    (columns ? part.n : part.m) = size;
    multiply_panel<In, T, Out>(part, columns ? a : a + (p.transpose_a ? first : first * p.lda),
                               columns ? b + (p.transpose_b ? first * p.ldb : first) : b, alpha,
                               c + (columns ? first : first * p.ldc));
  };
  if (blas && panels >= kPanelsPerThread * torch::stable::get_num_threads()) {
    torch::stable::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
      const OneThread alone;
      for (int64_t i = begin; i < end; ++i) run_panels(i * panel, std::min(panel, length - i * panel));
    });
  } else if (blas || std::is_same_v<T, Out>) {
    run_panels(0, length);
  } else {
    for (int64_t i = 0; i < panels; ++i) run_panels(i * panel, std::min(panel, length - i * panel));
  }
}

template <class In, class T, class Out>
void multiply_or_widen(const GemmParams& p, const In* a, const In* b, T alpha, Out* c) {
  if constexpr (!std::is_same_v<In, T>) {
    if (!has_blas<In, T>(p)) {
      const int64_t a_columns = p.transpose_a ? p.m : p.k, b_columns = p.transpose_b ? p.k : p.n;
      const auto wide_a = widened<In, T>(a, p.transpose_a ? p.k : p.m, a_columns, p.lda);
      const auto wide_b = widened<In, T>(b, p.transpose_b ? p.n : p.k, b_columns, p.ldb);
      GemmParams w = p;
      w.lda = a_columns, w.ldb = b_columns;
      return multiply<T, T, Out>(w, wide_a.get(), wide_b.get(), alpha, c);
    }
  }
  multiply<In, T, Out>(p, a, b, alpha, c);
}

template <class In, class T>
void run(const GemmParams& p) {
  const In* a = static_cast<const In*>(p.a);
  const In* b = static_cast<const In*>(p.b);
  const T alpha = p.alpha ? *static_cast<const T*>(p.alpha) : T(1);
  if (p.c_dtype == p.acc) return multiply_or_widen<In, T, T>(p, a, b, alpha, static_cast<T*>(p.c));
  with_dtype(p.c_dtype, [&](auto tag) {
    using Out = typename decltype(tag)::type;
    multiply_or_widen<In, T, Out>(p, a, b, alpha, static_cast<Out*>(p.c));
  });
}

}  // namespace

void gemm_cpu(const GemmParams& p) {
  if (p.m == 0 || p.n == 0) return;
  switch (p.ab_dtype) {
    case DType::f64:
      return run<double, double>(p);
    case DType::f32:
      return run<float, float>(p);
    case DType::bf16:
      return run<Bf16, float>(p);
    case DType::f16:
      return run<Half, float>(p);
  }
}

}  // namespace syncfree
