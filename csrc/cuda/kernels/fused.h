// Launchers of the Hopper path: three GEMMs and the small kernels between them. No torch, no device code.
//
// Notation: E = 2^(z - k) is what is stored of the logits z (in units of log2 e, scaled, with bias and softcap), k an
// integer a row that puts the target at 2^-40; the gradient of the logits is v * E for all classes but the target's,
// where it is g_t. With a softcap, E times the derivative of the cap is stored.
// docs/kernels.md has the derivation.
#pragma once

#include <cuda_runtime_api.h>

#include "../../common/params.h"

namespace syncfree {

constexpr int kLogitsTileColumns = 192;  // E's sums are kept a (row, tile of this many classes)
constexpr int kRowGroup = 256;           // rows of a cluster's tile; they are repaired together

// A pair for each row of a chunk and each tile of classes. Those of a few neighbouring rows lie together, tile by tile:
// the block that adds them up reads one piece of memory (fused_pair in fused_chunk.cuh).
constexpr int kPairRows = 8;
constexpr int64_t fused_pairs(int64_t size, int64_t tiles) {
  return (size + kPairRows - 1) / kPairRows * kPairRows * tiles;
}

// One of the chunks of a plan. The device spreads the live rows over as few of them as hold them (LiveRows); the slots
// past a chunk's live rows stand for the ignored rows, in order (see fused_chunk.cuh).
struct FusedChunk {
  const double* counts;
  const int32_t* row_index;  // [rows]
  int64_t rows;
  int64_t index;
  int64_t size, spare;
  const float* upstream;  // nullable: the gradient of the loss; alpha below is it times the reciprocal divisor
};

// Per-chunk arrays, all in device memory. Rows are compact: k-th row of the chunk.
struct FusedRows {
  float* exponent;      // [size]
  int32_t* target;      // [size], -1: none (not live, or no class)
  float* target_logit;  // [size]: z of the target before logit_scale, log2 e and softcap
  void* sums;           // float2 [fused_pairs]: of E before and after rounding; softcap: E, and what rounding took
  void* best;           // float2 [fused_pairs]: largest logit of another class, and the class; nullable
  double* smooth;       // [size]: label smoothing's sum of all classes' logits before logit_scale; else null
  float* v;             // [size]
  int32_t* bad;         // [size]: the row left the range that E can hold
  int32_t* only;        // [ceil(size / kRowGroup)]: groups with such a row
  int32_t* any;         // [1]: there is such a group
  int32_t* ticket;      // [1]: the next tile of dW
  float* g_target;      // [all rows], by position in row_index
  float* offset;        // likewise: what label smoothing takes off each class, times its weight; else null
};

// Sums over all classes, times their weights: of the rows of W and of the bias. Null without label smoothing.
struct FusedSmooth {
  const float* w;      // [hidden]
  const double* bias;  // [1], nullable: 0
};

// The rows of each class: positions sorted by target (stable), where each class begins (-1: it has none) and ends. rows
// is 0 where nothing is to be sorted.
struct FusedSortParams {
  const double* counts;
  const int32_t* row_index;
  int64_t rows, num_classes;
  const int64_t* targets;
  int64_t shift;
  int32_t *tile_keys, *keys, *tile_positions, *positions;  // [rows]
  int32_t *starts, *ends;                                  // [num_classes]; ends only where starts >= 0
  int64_t first_class = 0;                                 // the classes are those from here on
};

struct FusedGatherParams {
  FusedChunk chunk;
  const void* input;
  DType input_dtype;
  int64_t input_pitch, hidden;
  const void* weight;  // bfloat16 [classes, hidden]
  int64_t weight_pitch, num_classes;
  const float* bias;  // [classes], nullable
  FusedSmooth smooth;
  const int64_t* targets;
  int64_t shift;
  LossOptions options;
  void* gathered;  // bfloat16 [size, hidden], contiguous
  void* dx;        // nullable: contiguous, its ignored rows are set to 0
  DType dx_dtype;
  FusedRows rows;
  FusedSortParams sort;  // its first step is done beside the rows
};

struct FusedLogitsParams {
  FusedChunk chunk;
  const void* gathered;
  const void* weight;
  int64_t weight_pitch, num_classes, hidden;
  const float* bias;  // FusedBiasParams::out, where there is a bias or a softcap
  LossOptions options;
  void* e;  // bfloat16 [size, e_pitch], null: only the sums
  int64_t e_pitch;
  FusedRows rows;
};

struct FusedFinishParams {
  FusedChunk chunk;
  RowParams row;  // options and per-row outputs; no chunk, no logits, no gradient
  FusedRows rows;
  int64_t tiles;
  bool repair;     // second pass: only the groups that were marked, and what follows
  void* gathered;  // nullable: in the second pass, in place, bfloat16(alpha * v * x)
  int64_t hidden;
  FusedSortParams sort;  // of the gather before: its second step
};

struct FusedDxParams {
  FusedChunk chunk;
  const void* e;
  int64_t e_pitch;
  const void* weight;
  int64_t weight_pitch, num_classes, hidden;
  int parts;            // fused_dx_parts
  float* product;       // [size, hidden] with two parts, else unused
  const float* smooth;  // FusedSmooth::w
  FusedRows rows;
  void* out;  // dx, contiguous: the live rows
  DType out_dtype;
  bool share = false;  // out is float32 [size, hidden], row k that of slot k: a slice's share of dX
};

struct FusedDwParams {
  FusedChunk chunk;
  const void* e;
  int64_t e_pitch;
  const void* scaled;  // FusedFinishParams::gathered
  int64_t num_classes, hidden;
  void* sum;  // [classes, hidden], contiguous
  DType sum_dtype;
  bool accumulate;
  int32_t* ticket;  // FusedRows::ticket
  bool beside_dx;   // launch_fused_dx is the launch before: multiprocessors that it leaves idle are taken
  // 24-bit sums in sum (bfloat16) and low (split_low_bytes); starts: classes with an entry >= 0 keep their low bytes
  // for FusedTargetsParams. Null: sum holds all.
  uint8_t* low;
  const int32_t* starts;
};

// out[class] = cast(sum[class] + alpha * (sum over its rows of g_target * x - class_weight[class] * smooth)). sum and
// out may be the same memory; without smooth, classes without rows are then left alone.
struct FusedTargetsParams {
  const double* counts;
  const float* upstream;  // as in FusedChunk
  const int32_t *row_index, *keys, *positions, *starts, *ends;
  int64_t rows, num_classes, hidden;
  const void* input;
  DType input_dtype;
  int64_t input_pitch;
  const float* g_target;
  const float* smooth;        // [hidden], nullable: sum over the rows of offset * x
  const float* class_weight;  // nullable: 1
  const void* sum;
  DType sum_dtype;
  const uint8_t* low;  // nullable: sum has these bytes besides
  void* out;
  DType out_dtype;
};

// A copy of the bias that whole tiles can read; zeros without one.
struct FusedBiasParams {
  const float* bias;  // [num_classes], nullable
  int64_t num_classes, padded;
  float* out;  // [padded]
};

constexpr int kRowSumSlices = 256;

// sum = sum over rows r of factor[r] * matrix[index[r]], rounded to bfloat16 first; beside_sum = that of factor[r] *
// beside[r]. In slices, which are then added up in order.
struct FusedRowSumParams {
  const void* matrix;
  DType dtype;
  int64_t pitch, hidden;
  int64_t count;          // rows,
  const double* counts;   // or the live ones, if not null
  const int32_t* index;   // nullable: the rows in order
  const float* factor;    // nullable: 1
  const float* beside;    // nullable: 1
  float* slices;          // [kRowSumSlices, hidden]
  float* sum;             // [hidden]
  double* beside_slices;  // [kRowSumSlices]
  double* beside_sum;     // [1], nullable
};

// out = alpha * (sum of v E over all rows + sum over each class's rows of g_target - class_weight * offset_sum). The
// first is added up a chunk at a time, in slices.
struct FusedBiasGradientParams {
  FusedChunk chunk;
  const void* e;
  int64_t e_pitch, num_classes;
  const float* v;
  bool accumulate;
  float* slices;  // fused_bias_gradient_scratch
  const int32_t *positions, *starts, *ends;
  const float* g_target;
  const double* offset_sum;   // [1], nullable
  const float* class_weight;  // nullable: 1
  float* out;                 // [num_classes]
};

// A slice of the classes, [first_class, first_class + num_classes) of total_classes (ops/fused_shard.cpp). The kernels
// above see its classes counted from 0, and no target where it is of another slice.
struct FusedSlice {
  int64_t first_class, num_classes, total_classes;
};

// logits[position] = x . w_t where the slice has the target t; NaN where no slice has it; else 0.
struct FusedShardTargetsParams {
  const double* counts;
  const int32_t* row_index;
  int64_t rows;
  const void* input;
  DType input_dtype;
  int64_t input_pitch, hidden;
  const void* weight;  // bfloat16 [num_classes, hidden]
  int64_t weight_pitch;
  FusedSlice slice;
  const int64_t* targets;
  int64_t shift;
  float* logits;  // [rows]
};

// The gather of a slice: exponents come from the targets' logits of all slices, rows.target is of the slice.
struct FusedShardGatherParams {
  FusedChunk chunk;
  const void* input;
  DType input_dtype;
  int64_t input_pitch, hidden;
  FusedSlice slice;
  const int64_t* targets;
  int64_t shift;
  LossOptions options;
  const float* logits;  // [rows], by position
  void* gathered;       // bfloat16 [size, hidden], contiguous
  FusedRows rows;
};

// What is combined over the slices, planes of [size]: the exponent k that the row's E is relative to, the sum of E, the
// target's logit (before logit_scale and softcap; 0 where another slice has it), and what rounding took from what is
// stored of E.
enum ShardStat { kShardExponent, kShardSum, kShardTarget, kShardResidue, kShardStats };

struct FusedShardStatsParams {
  FusedChunk chunk;
  FusedRows rows;
  int64_t tiles;
  bool repair;  // second pass: only the groups that were marked
  LossOptions options;
  FusedSlice slice;
  float* stats;        // [kShardStats, size]
  int64_t* predicted;  // [all rows], nullable: the class of the slice's largest logit; -1 for ignored rows
  float* largest;      // [all rows] by position, nullable: that logit in the sense of the scale's sign
};

// Losses from the statistics of all slices; v, g_target and target as the dX of this slice takes them.
struct FusedShardFinishParams {
  FusedChunk chunk;
  RowParams row;           // as in FusedFinishParams
  const float* own_stats;  // [kShardStats, size]: of this slice,
  const float* stats;      // and of all
  FusedSlice slice;
  FusedRows rows;
};

// gathered = bfloat16(alpha v x), in place; the ticket of the dW that follows becomes 0.
struct FusedShardScaleParams {
  FusedChunk chunk;
  void* gathered;
  int64_t hidden;
  const float* v;
  int32_t* ticket;
};

// The live rows of dx from row k of a sum over the slices for slot k, and zeros in the ignored ones.
struct FusedShardStoreParams {
  FusedChunk chunk;
  const float* sum;  // [size, hidden]
  int64_t hidden;
  void* dx;  // contiguous
  DType dx_dtype;
};

// Whether dW of this shape can be kept in 24 bits, and the bytes that takes beside it.
constexpr bool can_split(int64_t num_classes, int64_t hidden) {
  return num_classes % 64 == 0 && hidden % 128 == 0;
}
constexpr int64_t split_low_bytes(int64_t num_classes, int64_t hidden) {
  return num_classes * hidden;
}

int64_t fused_bias_gradient_scratch(int64_t e_pitch);  // in floats
bool fused_supported_device();                         // compute capability 9.0
// In how many parts, 1 or 2, dX of a chunk is added up; two take float32 rows beside it. beside_dw: dW follows and takes
// the multiprocessors that are left idle.
int fused_dx_parts(int64_t rows, int64_t num_classes, int64_t hidden, bool beside_dw);
// An estimate of how long chunks of `size` rows take, to compare sizes with, in passes of a full device over the
// classes.
double fused_cost(int64_t rows, int64_t size, int64_t num_classes, int64_t hidden, bool beside_dw);

cudaError_t launch_fused_gather(const FusedGatherParams& p, cudaStream_t stream);
cudaError_t launch_fused_logits(const FusedLogitsParams& p, cudaStream_t stream);
// Redoes the marked row groups with exponents from their maxima: two GEMMs that find no tile when nothing is marked.
cudaError_t launch_fused_repair(const FusedLogitsParams& p, int64_t tiles, cudaStream_t stream);
cudaError_t launch_fused_finish(const FusedFinishParams& p, cudaStream_t stream);
cudaError_t launch_fused_dx(const FusedDxParams& p, cudaStream_t stream);
// Brings home what was added up in two parts; nothing otherwise.
cudaError_t launch_fused_dx_store(const FusedDxParams& p, cudaStream_t stream);
cudaError_t launch_fused_dw(const FusedDwParams& p, cudaStream_t stream);
cudaError_t launch_fused_sort(const FusedSortParams& p, cudaStream_t stream);
cudaError_t launch_fused_targets(const FusedTargetsParams& p, cudaStream_t stream);
cudaError_t launch_fused_bias(const FusedBiasParams& p, cudaStream_t stream);
cudaError_t launch_fused_row_sum(const FusedRowSumParams& p, cudaStream_t stream);
cudaError_t launch_fused_bias_slices(const FusedBiasGradientParams& p, cudaStream_t stream);  // of a chunk
cudaError_t launch_fused_bias_finish(const FusedBiasGradientParams& p, cudaStream_t stream);  // after the last one

cudaError_t launch_fused_shard_targets(const FusedShardTargetsParams& p, cudaStream_t stream);
cudaError_t launch_fused_shard_gather(const FusedShardGatherParams& p, cudaStream_t stream);
cudaError_t launch_fused_shard_stats(const FusedShardStatsParams& p, cudaStream_t stream);
cudaError_t launch_fused_shard_finish(const FusedShardFinishParams& p, cudaStream_t stream);
cudaError_t launch_fused_shard_scale(const FusedShardScaleParams& p, cudaStream_t stream);
cudaError_t launch_fused_shard_store(const FusedShardStoreParams& p, cudaStream_t stream);

}  // namespace syncfree
