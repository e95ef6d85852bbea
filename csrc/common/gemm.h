// C = alpha op(A) op(B) + (accumulate ? C : 0), row-major, sums in the accumulation type. Each side implements it on
// what torch has loaded.
#pragma once

#include "params.h"

namespace syncfree {

struct GemmParams {
  int64_t m, n, k;
  const void* a;  // [m, k], or [k, m] when transpose_a
  int64_t lda;
  bool transpose_a;
  const void* b;  // [k, n], or [n, k] when transpose_b
  int64_t ldb;
  bool transpose_b;
  DType ab_dtype;
  void* c;
  int64_t ldc;
  DType c_dtype;
  bool accumulate;
  const void* alpha;  // nullable: 1; else acc[3] = {alpha, 0, 1} where the product is computed, read there
  DType acc;
  // The reduction may be summed in this many parts, each added to C. A long float32 sum loses digits as it grows: at
  // 1024 products with a sum of 30, one part gave dX of a confident model an error of 1.4e-5 against a bound of 1e-5,
  // which four parts keep.
  int parts;
};

}  // namespace syncfree
