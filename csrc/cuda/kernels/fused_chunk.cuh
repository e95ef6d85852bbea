// Which rows a chunk of the Hopper path holds, worked out by each warp or block for itself, and where it keeps what it
// knows of them.
#pragma once

#include "../../common/chunk_plan.h"
#include "fused.h"

namespace syncfree {

struct ChunkRows {
  int64_t first;  // position of the first live row in row_index
  int64_t live;   // slots [0, live) are positions first, first + 1, ...
  int64_t dead;   // slots [live, size) are positions dead, dead + 1, ... below the number of rows
  bool last;      // no chunk after this one has live rows

  __device__ __forceinline__ explicit ChunkRows(const FusedChunk& c) {
    const int64_t n = static_cast<int64_t>(c.counts[kCountRows]);
    const LiveRows here(n, c.size, c.spare, kRowGroup, c.index);
    first = here.first, live = here.count;
    dead = n + c.index * c.size - first - live;  // of the slots before, `first` were live
    last = first + live == n;
  }

  // The row of slot k, or -1 for a slot past the last row.
  __device__ __forceinline__ int64_t row(const FusedChunk& c, int64_t k) const {
    const int64_t position = k < live ? first + k : dead + k;
    return position < c.rows ? c.row_index[position] : -1;
  }
};

// Where the pair of a row and a tile is, of fused_pairs.
__device__ __forceinline__ int64_t fused_pair(int64_t row, int64_t tile, int64_t tiles) {
  return (int64_t(uint32_t(row) / kPairRows) * tiles + tile) * kPairRows + uint32_t(row) % kPairRows;
}

// What turns a product with v E into a gradient: the reciprocal divisor times the upstream gradient.
__device__ __forceinline__ float gradient_factor(const double* counts, const float* upstream) {
  return static_cast<float>(counts[kInverseCe] * (upstream ? static_cast<double>(*upstream) : 1.0));
}

}  // namespace syncfree
