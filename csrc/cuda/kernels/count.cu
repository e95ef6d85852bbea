// Target statistics and the list of valid rows: N, D, C and the reciprocal divisors as device scalars, rows in a stable
// order.
//
// 1. count_blocks: a block takes kItems targets (or class weights) and leaves their number, summed weight and maxima.
// 2. count_finish: one block adds these up in a fixed order, and turns the numbers into offsets.
// 3. count_rows:   each block scans its targets again and writes row indices at its offset.
// Bytes: targets twice, 4 for each row written. Sums in double, so that N is exact and D does not depend on the order
// of blocks.
#include "../../common/formulas.h"
#include "device.cuh"
#include "launch.h"

namespace syncfree {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 8;
constexpr int64_t kItems = kThreads * kEach;
constexpr int kFinishThreads = 1024;

int64_t blocks_of(int64_t items) {
  return (items + kItems - 1) / kItems;
}

struct Partial {
  double weight;  // D of these rows, or C of these classes
  double largest;
  int64_t rows;    // valid rows
  int64_t offset;  // valid rows before these
};

__device__ __forceinline__ bool has_target(const CountParams& p, int64_t i) {
  return i < p.rows && !(p.shift && i % p.sequence + p.shift >= p.sequence);
}

__device__ __forceinline__ bool is_valid(const CountParams& p, int64_t i) {
  return has_target(p, i) && p.target[i + p.shift] != p.ignore_index;
}

__global__ void __launch_bounds__(kThreads) count_blocks_kernel(CountParams p, Partial* partials, int64_t row_blocks) {
  __shared__ double shared[kThreads / kWarp];
  const float* weight = static_cast<const float*>(p.weight);
  const float* token_weight = static_cast<const float*>(p.token_weight);
  const float* upstream = static_cast<const float*>(p.upstream);
  double sum = 0, largest = 0, rows = 0;
  if (blockIdx.x < row_blocks) {
    const int64_t begin = blockIdx.x * kItems + threadIdx.x;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int64_t i = begin + e * kThreads;
      if (!is_valid(p, i)) continue;
      rows += 1;
      const int64_t t = p.target[i + p.shift];
      if (weight) sum += t >= 0 && t < p.num_classes ? double(weight[t]) : double(NAN);
      double multiplier = token_weight ? token_weight[i + p.shift] : 1.f;
      if (upstream) multiplier *= upstream[i * p.upstream_stride];
      largest = fmax(largest, fabs(multiplier));
    }
  } else {
    const int64_t begin = (blockIdx.x - row_blocks) * kItems + threadIdx.x;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int64_t j = begin + e * kThreads;
      if (j >= p.num_classes) continue;
      sum += double(weight[j]);
      largest = fmax(largest, fabs(double(weight[j])));
    }
  }
  rows = block_reduce<kThreads>(rows, Sum(), shared);
  sum = block_reduce<kThreads>(sum, Sum(), shared);
  largest = block_reduce<kThreads>(largest, Max(), shared);
  if (threadIdx.x == 0) partials[blockIdx.x] = {sum, largest, int64_t(rows), 0};
}

__global__ void __launch_bounds__(kFinishThreads)
    count_finish_kernel(CountParams p, Partial* partials, int64_t row_blocks, int64_t weight_blocks) {
  __shared__ double shared[kFinishThreads / kWarp];
  __shared__ int64_t scan[kFinishThreads];
  double d = 0, multiplier = 0, c = 0, largest = 0;
  int64_t before = 0;
  for (int64_t first = 0; first < row_blocks; first += kFinishThreads) {
    const int64_t b = first + threadIdx.x;
    const int64_t own = b < row_blocks ? partials[b].rows : 0;
    if (b < row_blocks) d += partials[b].weight, multiplier = fmax(multiplier, partials[b].largest);
    scan[threadIdx.x] = own;
    __syncthreads();
    for (int offset = 1; offset < kFinishThreads; offset *= 2) {
      const int64_t left = threadIdx.x >= unsigned(offset) ? scan[threadIdx.x - offset] : 0;
      __syncthreads();
      scan[threadIdx.x] += left;
      __syncthreads();
    }
    if (b < row_blocks) partials[b].offset = before + scan[threadIdx.x] - own;
    before += scan[kFinishThreads - 1];
    __syncthreads();
  }
  for (int64_t b = threadIdx.x; b < weight_blocks; b += kFinishThreads) {
    c += partials[row_blocks + b].weight;
    largest = fmax(largest, partials[row_blocks + b].largest);
  }
  d = block_reduce<kFinishThreads>(d, Sum(), shared);
  multiplier = block_reduce<kFinishThreads>(multiplier, Max(), shared);
  c = block_reduce<kFinishThreads>(c, Sum(), shared);
  largest = block_reduce<kFinishThreads>(largest, Max(), shared);
  if (threadIdx.x == 0) {
    const double n = double(before);
    const bool weighted = p.weight != nullptr;
    write_counts(p.counts, n, weighted ? d : n, weighted ? c : double(p.num_classes), weighted ? largest : 1.0,
                 p.token_weight || p.upstream ? multiplier : 1.0, p.reduction, weighted, p.num_items);
  }
}

__global__ void __launch_bounds__(kThreads) count_rows_kernel(CountParams p, const Partial* partials) {
  __shared__ int warp_total[kThreads / kWarp];
  const int64_t n = static_cast<int64_t>(p.counts[kCountRows]), begin = blockIdx.x * kItems;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int64_t valid_at = partials[blockIdx.x].offset, ignored_at = n + begin - valid_at;
#pragma unroll 1
  for (int e = 0; e < kEach; ++e) {
    const int64_t start = begin + e * kThreads, i = start + threadIdx.x;
    if (start >= p.rows) return;
    const bool valid = is_valid(p, i);
    const unsigned ballot = __ballot_sync(0xffffffffu, valid);
    if (lane == 0) warp_total[warp] = __popc(ballot);
    __syncthreads();
    int before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < kThreads / kWarp; ++w) before += w < warp ? warp_total[w] : 0, all += warp_total[w];
    before += __popc(ballot & ((1u << lane) - 1));
    if (i < p.rows) p.row_index[valid ? valid_at + before : ignored_at + (int(threadIdx.x) - before)] = int32_t(i);
    valid_at += all;
    ignored_at += kThreads - all;
    __syncthreads();  // warp_total is written again
  }
}

// All in one block, for as many rows as a chunk or two and no class weights: launches cost the host more than this
// costs the device.
constexpr int64_t kSmallEach = 16, kSmallRows = kFinishThreads * kSmallEach;

__global__ void __launch_bounds__(kFinishThreads) count_small_kernel(CountParams p) {
  __shared__ double shared[kFinishThreads / kWarp];
  __shared__ int warp_total[kFinishThreads / kWarp];
  const float* token_weight = static_cast<const float*>(p.token_weight);
  const float* upstream = static_cast<const float*>(p.upstream);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  // A warp takes rows that lie together, a lane each kWarp-th of them.
  const int each = int((p.rows + kFinishThreads - 1) / kFinishThreads);
  const int64_t begin = int64_t(warp) * each * kWarp + lane;
  int64_t target[kSmallEach];
#pragma unroll  // all loads, before any is used
  for (int e = 0; e < kSmallEach; ++e) {
    const int64_t i = begin + e * kWarp;
    target[e] = e < each && has_target(p, i) ? p.target[i + p.shift] : p.ignore_index;
  }
  unsigned valid[kSmallEach];
  int in_warp = 0;
#pragma unroll
  for (int e = 0; e < kSmallEach; ++e) {
    valid[e] = __ballot_sync(0xffffffffu, target[e] != p.ignore_index);
    in_warp += __popc(valid[e]);
  }
  double largest = 0;
  if (token_weight || upstream) {
#pragma unroll
    for (int e = 0; e < kSmallEach; ++e) {
      if (!((valid[e] >> lane) & 1)) continue;
      const int64_t i = begin + e * kWarp;
      double multiplier = token_weight ? token_weight[i + p.shift] : 1.f;
      if (upstream) multiplier *= upstream[i * p.upstream_stride];
      largest = fmax(largest, fabs(multiplier));
    }
  }
  if (lane == 0) warp_total[warp] = in_warp;
  __syncthreads();
  int64_t n = 0, before = 0;
  for (int w = 0; w < kFinishThreads / kWarp; ++w) {
    if (w == warp) before = n;
    n += warp_total[w];
  }
#pragma unroll
  for (int e = 0; e < kSmallEach; ++e) {
    const int64_t i = begin + e * kWarp, rank = before + __popc(valid[e] & ((1u << lane) - 1));
    if (e < each && i < p.rows) p.row_index[(valid[e] >> lane) & 1 ? rank : n + i - rank] = int32_t(i);
    before += __popc(valid[e]);
  }
  largest = block_reduce<kFinishThreads>(largest, Max(), shared);
  if (threadIdx.x == 0)
    write_counts(p.counts, double(n), double(n), double(p.num_classes), 1.0,
                 p.token_weight || p.upstream ? largest : 1.0, p.reduction, false, p.num_items);
}

}  // namespace

int64_t count_scratch_bytes(int64_t rows, int64_t num_classes) {
  return (blocks_of(rows) + blocks_of(num_classes)) * int64_t(sizeof(Partial));
}

cudaError_t launch_count(const CountParams& p, cudaStream_t stream) {
  if (p.rows <= kSmallRows && !p.weight) {
    count_small_kernel<<<1, kFinishThreads, 0, stream>>>(p);
    return cudaGetLastError();
  }
  const int64_t row_blocks = blocks_of(p.rows), weight_blocks = p.weight ? blocks_of(p.num_classes) : 0;
  Partial* partials = static_cast<Partial*>(p.scratch);
  if (row_blocks + weight_blocks)
    count_blocks_kernel<<<unsigned(row_blocks + weight_blocks), kThreads, 0, stream>>>(p, partials, row_blocks);
  count_finish_kernel<<<1, kFinishThreads, 0, stream>>>(p, partials, row_blocks, weight_blocks);
  if (row_blocks) count_rows_kernel<<<unsigned(row_blocks), kThreads, 0, stream>>>(p, partials);
  return cudaGetLastError();
}

}  // namespace syncfree
