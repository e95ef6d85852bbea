// Rows in and out of a chunk: gather, store, cast, and the column sums of a chunk. Each row, or block of columns, is
// one task, so the values do not depend on the number of threads.
#include <cmath>

#include "backend.h"
#include "numbers.h"

namespace syncfree {
namespace {

template <class In, class Out>
void convert_row(const In* in, Out* out, int64_t n) {
  if constexpr (std::is_same_v<In, Out>)
    std::memcpy(out, in, size_t(n) * sizeof(In));
  else
    for (int64_t j = 0; j < n; ++j) out[j] = narrow<Out>(widen(in[j]));
}

// Multiplied by it, a row of float16 has its largest magnitude in [2^14, 2^15): the range of float16 is spent on small
// values.
template <class T>
T normalising_power(const T* values, T alpha, int64_t n) {
  T largest = 0;
  for (int64_t j = 0; j < n; ++j) {
    const T a = std::fabs(alpha * values[j]);
    largest = a > largest ? a : largest;
  }
  if (!(largest > 0) || !std::isfinite(largest)) return 1;
  int exponent = 0;
  std::frexp(largest, &exponent);
  return T(std::ldexp(1.0, std::clamp(15 - exponent, -126, 126)));
}

// out = cast(alpha * in) of one row; row_scale as in StoreRowsParams. In place where out is in.
template <class T, class Out>
void store_row(const T* in, T alpha, Out* out, int64_t n, float* row_scale) {
  if (row_scale) {
    const T power = normalising_power(in, alpha, n);
    *row_scale = float(T(1) / power);
    for (int64_t j = 0; j < n; ++j) out[j] = narrow<Out>(alpha * in[j] * power);
  } else {
    for (int64_t j = 0; j < n; ++j) out[j] = narrow<Out>(alpha * in[j]);
  }
}

template <class In, class T>
void sum_columns(const ColumnSumParams& p) {
  constexpr int64_t kBlock = 1024;  // partial sums stay in the first cache
  const int64_t live = live_rows(p.chunk), blocks = (p.columns + kBlock - 1) / kBlock;
  parallel(blocks, kBlock * std::max<int64_t>(live, 1), [&](int64_t begin, int64_t end) {
    T partial[kBlock];
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b * kBlock, n = std::min(kBlock, p.columns - first);
      std::fill_n(partial, n, T(0));
      for (int64_t k = 0; k < live; ++k) {
        const In* g = static_cast<const In*>(p.g) + k * p.g_pitch + first;
        for (int64_t j = 0; j < n; ++j) partial[j] += T(widen(g[j]));
      }
      T* sum = static_cast<T*>(p.sum) + first;
      for (int64_t j = 0; j < n; ++j) sum[j] = p.accumulate ? sum[j] + partial[j] : partial[j];
    }
  });
}

}  // namespace

void gather_cpu(const GatherParams& p) {
  const int64_t live = live_rows(p.chunk);
  with_dtype(p.input_dtype, [&](auto in_tag) {
    with_dtype(p.out_dtype, [&](auto out_tag) {
      using In = typename decltype(in_tag)::type;
      using Out = typename decltype(out_tag)::type;
      parallel(p.chunk.size, p.columns, [&](int64_t begin, int64_t end) {
        for (int64_t k = begin; k < end; ++k) {
          Out* out = static_cast<Out*>(p.out) + k * p.out_pitch;
          if (k >= live) {
            std::memset(out, 0, size_t(p.columns) * sizeof(Out));
          } else {
            convert_row(static_cast<const In*>(p.input) + p.chunk.row_index[p.chunk.first + k] * p.input_pitch, out,
                        p.columns);
          }
        }
      });
    });
  });
}

void add_targets_cpu(const AddTargetsParams& p) {
  const int64_t live = live_rows(p.chunk);
  with_acc(p.acc, [&](auto acc_tag) {
    with_dtype(p.weight_dtype, [&](auto weight_tag) {
      using T = typename decltype(acc_tag)::type;
      using W = typename decltype(weight_tag)::type;
      parallel(live, p.columns, [&](int64_t begin, int64_t end) {
        for (int64_t k = begin; k < end; ++k) {
          const int64_t target = p.target[p.chunk.row_index[p.chunk.first + k] + p.shift];
          const bool here = target >= p.first_class && target - p.first_class < p.classes;
          const T residue = static_cast<const T*>(p.residue)[k];
          const W* w = static_cast<const W*>(p.weight) + (here ? target - p.first_class : 0) * p.weight_pitch;
          T* product = static_cast<T*>(p.product) + k * p.product_pitch;
          for (int64_t j = 0; j < p.columns; ++j) product[j] += residue * T(widen(w[j]));
        }
      });
    });
  });
}

void store_rows_cpu(const StoreRowsParams& p) {
  const int64_t live = live_rows(p.chunk);
  with_acc(p.acc, [&](auto acc_tag) {
    with_dtype(p.out_dtype, [&](auto out_tag) {
      using T = typename decltype(acc_tag)::type;
      using Out = typename decltype(out_tag)::type;
      const T alpha = *static_cast<const T*>(p.alpha);
      parallel(p.chunk.size, p.columns, [&](int64_t begin, int64_t end) {
        for (int64_t k = begin; k < end; ++k) {
          const int64_t i = p.chunk.row_index[p.chunk.first + k];
          Out* out = static_cast<Out*>(p.out) + i * p.out_pitch;
          float* row_scale = p.row_scale ? p.row_scale + i : nullptr;
          if (k < live) {
            store_row(static_cast<const T*>(p.product) + k * p.product_pitch, alpha, out, p.columns, row_scale);
          } else {
            std::memset(out, 0, size_t(p.columns) * sizeof(Out));
            if (row_scale) *row_scale = 1;
          }
        }
      });
    });
  });
}

void cast_rows_cpu(const CastRowsParams& p) {
  with_acc(p.acc, [&](auto acc_tag) {
    with_dtype(p.out_dtype, [&](auto out_tag) {
      using T = typename decltype(acc_tag)::type;
      using Out = typename decltype(out_tag)::type;
      const T alpha = p.alpha ? *static_cast<const T*>(p.alpha) : T(1);
      parallel(p.rows, p.columns, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          store_row(static_cast<const T*>(p.sum) + r * p.columns, alpha, static_cast<Out*>(p.out) + r * p.columns,
                    p.columns, p.row_scale ? p.row_scale + r : nullptr);
        }
      });
    });
  });
}

void column_sum_cpu(const ColumnSumParams& p) {
  with_acc(p.acc, [&](auto acc_tag) {
    with_dtype(p.g_dtype,
               [&](auto g_tag) { sum_columns<typename decltype(g_tag)::type, typename decltype(acc_tag)::type>(p); });
  });
}

}  // namespace syncfree
