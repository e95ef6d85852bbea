// Parameters of every kernel, shared by the CPU and the CUDA side. No torch here, and no device code.
//
// Conventions: row-major matrices with a pitch in elements; int64 offsets; "acc" is the accumulation type, float, or
// double where the products are double (CPU only). Pointers named in "nullable" comments may be null; all others must
// be valid.
#pragma once

#include <cstdint>

namespace syncfree {

enum class DType : int32_t { f32, f64, bf16, f16 };
enum class Reduction : int32_t { none, mean, sum };

// Slots of `counts`, the float64 vector on the device that every later stage reads.
enum CountSlot : int32_t {
  kCountRows = 0,     // N, rows with a target to score
  kCountWeight = 1,   // D, their summed class weights; N without class weights
  kCountClasses = 2,  // C, all class weights summed; V without class weights
  kInverseCe = 3,     // reciprocal divisor of the cross-entropy part: 0 when N = 0, NaN when the divisor is 0 and N > 0
  kInverseZ = 4,      // reciprocal divisor of the z part
  kMaxWeight = 5,     // max |class weight|, 1 without class weights
  kMaxMultiplier = 6,  // max |token weight x upstream| over the scored rows, 1 without either
  kCountSlots = 8,
};

// How the mathematics is set up; the same for all rows. Device scalars, where set, replace the host values beside them.
struct LossOptions {
  double label_smoothing;
  double softcap;  // 0: none
  double logit_scale;
  const double* logit_scale_ptr;  // nullable
  double z_loss_weight;
  const double* z_loss_weight_ptr;  // nullable
  bool token_scaling;
  Reduction reduction;
};

// Reads the targets once. Order of row_index: scored rows ascending, then the ignored rows ascending.
struct CountParams {
  const int64_t* target;  // [rows]; row i is scored against target[i + shift] when i % sequence + shift < sequence
  int64_t rows;
  int64_t sequence;
  int64_t shift;
  int64_t num_classes;
  int64_t ignore_index;
  const void* weight;        // acc [num_classes], nullable
  const void* token_weight;  // acc [rows], indexed as target, nullable
  const void* upstream;      // acc, upstream[i * upstream_stride] of row i, nullable
  int64_t upstream_stride;
  const double* num_items;  // nullable
  Reduction reduction;
  DType acc;
  double* counts;      // [kCountSlots]
  int32_t* row_index;  // [rows]
  void* scratch;       // CUDA: count_scratch_bytes(rows, num_classes); CPU: unused
};

// The live rows of a chunk are clamp(counts[kCountRows] - first, 0, size); its k-th row is row_index[first + k].
struct Chunk {
  const double* counts;
  const int32_t* row_index;
  int64_t first;
  int64_t size;
};

// out[k, :] = input[row_index[first + k], :], zeros for rows past the live ones.
struct GatherParams {
  Chunk chunk;
  const void* input;
  DType input_dtype;
  int64_t input_pitch;
  int64_t columns;
  void* out;
  DType out_dtype;
  int64_t out_pitch;
};

// Statistics, losses and the gradient of the logits, a row at a time. See formulas.h for the mathematics.
struct RowParams {
  Chunk chunk;
  LossOptions options;
  int64_t num_classes;    // of the logits: the classes [first_class, first_class + num_classes)
  int64_t first_class;    // 0 but for a slice of the vocabulary
  int64_t total_classes;  // V

  const void* logits;  // row k of the chunk, or row row_index[first + k] when by_row_index
  DType logits_dtype;
  int64_t logits_pitch;
  bool by_row_index;

  const int64_t* target;  // row i: target[i + shift]
  int64_t shift;
  const void* bias;          // acc [num_classes], nullable
  const void* weight;        // acc [total_classes], nullable
  const void* token_weight;  // acc, row i: token_weight[i + shift], nullable
  const void* upstream;      // acc, row i: upstream[i * upstream_stride], nullable
  int64_t upstream_stride;
  DType acc;

  // Per row i (not k), each nullable. Undivided; ignored rows are written 0 (predicted: -1).
  void* ce;            // acc: cross-entropy part
  void* z;             // acc: z part
  float* correct;      // 1 where the argmax is the target
  int64_t* predicted;  // argmax over these classes, ties to the lowest
  void* logsumexp;     // acc

  // row_stats: acc [rows of logits, 4], in the order of RowStats; nullable. Written when read_stats is false, read
  // instead of a first pass when true. Where the target is not among these classes, the target's logit is written as
  // that of the first one; what is read is of all classes.
  void* row_stats;
  bool read_stats;

  // Gradient of the logits (before bias and logit_scale: of x W^T), nullable. May be the memory of logits, row on row,
  // when its elements are not larger; never otherwise. In a chunk: no divisor, rows past the live ones are zeroed,
  // float16 carries 2^half_exponent(counts). With `divide` (cross_entropy): final, times reciprocal divisors and
  // upstream_scalar.
  void* grad;
  DType grad_dtype;
  int64_t grad_pitch;
  bool divide;
  const void* upstream_scalar;  // acc, nullable; only with divide

  void* residue;  // acc [chunk rows], nullable; only with grad: what rounding took from row k of it, summed
};

// alpha[3] = {1/divisor x upstream_scalar x 2^-half_exponent, 0, 1}: what turns a product with g into a gradient, and
// BLAS constants.
struct AlphaParams {
  const double* counts;
  LossOptions options;
  const void* upstream_scalar;  // acc, nullable
  bool half;                    // g is float16
  DType acc;
  void* alpha;  // acc [3]
};

// product[k, :] += residue[k] * weight[t - first_class, :] for the live rows, t being the target: its gradient takes what
// rounding took from the row. Where the target is none of [first_class, first_class + classes) the first of these takes
// it: what counts is that it does not multiply the mean row of the weight.
struct AddTargetsParams {
  Chunk chunk;
  const int64_t* target;  // row i: target[i + shift]
  int64_t shift;
  int64_t first_class;
  int64_t classes;
  const void* residue;  // acc [size]
  DType acc;
  const void* weight;
  DType weight_dtype;
  int64_t weight_pitch;
  int64_t columns;
  void* product;  // acc [size, columns]
  int64_t product_pitch;
};

// dx[row_index[first + k], :] = alpha * product[k, :]; ignored rows are written 0. float16: the row is normalised by a
// power of two and row_scale[row] is the factor that removes it.
struct StoreRowsParams {
  Chunk chunk;
  const void* product;  // acc [size, columns]
  int64_t product_pitch;
  int64_t columns;
  const void* alpha;
  DType acc;
  void* out;
  DType out_dtype;
  int64_t out_pitch;
  float* row_scale;  // nullable
};

// out[r, :] = cast(alpha * sum[r, :]), alpha null: 1. row_scale as above, with r itself as the row.
struct CastRowsParams {
  const void* sum;  // acc [rows, columns], contiguous
  int64_t rows;
  int64_t columns;
  const void* alpha;  // nullable
  DType acc;
  void* out;  // contiguous
  DType out_dtype;
  float* row_scale;  // nullable
};

// sum[j] += or = column sums of g over the chunk's live rows, in a fixed order.
struct ColumnSumParams {
  Chunk chunk;
  const void* g;
  DType g_dtype;
  int64_t g_pitch;
  int64_t columns;
  bool accumulate;
  DType acc;
  void* sum;      // acc [columns]
  void* scratch;  // CUDA: column_sum_scratch_bytes(columns); CPU: unused
};

// The per-row parts to the results, summed in a fixed order.
struct ReduceParams {
  const double* counts;
  Reduction reduction;
  int64_t rows;
  const void* ce;        // acc [rows]
  const void* z;         // acc [rows]
  const float* correct;  // [rows], nullable
  DType acc;
  void* loss;       // acc: [rows] for none (may be ce), else [1]
  void* z_loss;     // likewise (may be z)
  float* accuracy;  // [1], mean and sum only, nullable
};

constexpr int kMaxScaleTensors = 8;

// data *= scale (times row_scale), untouched where the factor is exactly 1.
struct ScaleParams {
  int count;
  const void* scale;  // acc of scale_dtype, 1 element
  DType scale_dtype;
  struct Item {
    void* data;
    DType dtype;
    int64_t rows;
    int64_t columns;
    const float* row_scale;  // [rows], nullable
  } items[kMaxScaleTensors];
};

}  // namespace syncfree
