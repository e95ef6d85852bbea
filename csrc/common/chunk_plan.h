// How many rows of logits are alive at once, and which.
#pragma once

#include <algorithm>
#include <cstdint>

#include "formulas.h"

namespace syncfree {

struct ChunkPlan {
  int64_t rows;       // rows of a chunk
  int64_t count;      // chunks
  int64_t spare = 0;  // of its rows, those that are left to the last chunk (LiveRows)
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

// As few chunks as hold that many rows, all but the last without their spare ones.
SF_HOST_DEVICE int64_t chunks_of(int64_t rows, int64_t size, int64_t spare) {
  if (rows <= size) return rows > 0;
  return (rows - spare + size - spare - 1) / (size - spare);
}

// Which of the live rows, whose number only the device knows, a chunk holds: they are spread over as few chunks as hold
// them, evenly and in whole groups, and the last one with live rows takes the spare ones too. Spare rows, fewer than
// size, are what a chunk has beside whole groups.
struct LiveRows {
  int64_t first, count;

  SF_HOST_DEVICE LiveRows(int64_t live, int64_t size, int64_t spare, int64_t group, int64_t index) {
    const int64_t chunks = chunks_of(live, size, spare), whole = size - spare,
                  even = chunks ? ((live + chunks - 1) / chunks + group - 1) / group * group : whole,
                  each = even < whole ? even : whole;
    first = index < chunks && index * each < live ? index * each : live;
    const int64_t rest = live - first;
    count = index + 1 == chunks || rest < each ? rest : each;
  }
};

// Room for a few rows more than fill a number of chunks, so that they do not take one chunk more.
inline ChunkPlan with_spare(ChunkPlan plan, int64_t rows, int64_t spare) {
  if (plan.count <= 1 || plan.rows + spare > rows) return plan;
  plan.rows += spare, plan.spare = spare;
  plan.count = chunks_of(rows, plan.rows, spare);
  return plan;
}

}  // namespace syncfree
