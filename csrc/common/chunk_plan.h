// How many rows of logits are alive at once.
#pragma once

#include <algorithm>
#include <cstdint>

namespace syncfree {

struct ChunkPlan {
  int64_t rows;   // rows of a chunk
  int64_t count;  // chunks
};

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
constexpr int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

// Rows of logits are padded to 16 bytes, so that GEMMs and vector loads find them aligned whatever V is.
constexpr int64_t logits_pitch(int64_t num_classes, int64_t element_bytes) {
  return round_up(num_classes, 16 / element_bytes);
}

// chunk_rows and workspace_bytes: 0 means not given. A chunk holds as many rows as the workspace takes, but no fewer
// than min_rows (many tiny chunks starve the GEMMs), then the rows are spread evenly so that no chunk is left with a
// few. Rows are multiples of `multiple`.
inline ChunkPlan plan_chunks(int64_t rows, int64_t row_bytes, int64_t chunk_rows, int64_t workspace_bytes,
                             int64_t default_workspace, int64_t min_rows, int64_t multiple) {
  if (rows == 0) return {0, 0};
  int64_t size = chunk_rows;
  if (size == 0)
    size = workspace_bytes ? workspace_bytes / row_bytes : std::max(default_workspace / row_bytes, min_rows);
  size = std::clamp<int64_t>(size, 1, rows);
  if (chunk_rows == 0) {
    if (size > multiple) size -= size % multiple;
    size = ceil_div(rows, ceil_div(rows, size));
  }
  size = std::min(round_up(size, multiple), round_up(rows, multiple));
  size = std::min(size, rows);
  return {size, ceil_div(rows, size)};
}

}  // namespace syncfree
