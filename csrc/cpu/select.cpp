// Positions that are set, a fixed number of them for each row: the first, or those with the smallest keys.
#include <algorithm>
#include <vector>

#include "../common/keys.h"
#include "backend.h"
#include "numbers.h"

namespace syncfree {
namespace {

struct Candidate {
  uint64_t key;
  int64_t position;
  // Ties go to the lower position, as in a stable sort.
  bool operator<(const Candidate& other) const {
    return key != other.key ? key < other.key : position < other.position;
  }
};

uint64_t key_of(const SelectParams& p, int64_t row, int64_t position) {
  const int64_t at = row * p.length + position;
  switch (p.key_kind) {
    case KeyKind::philox:
      return philox_keys(p.seed, p.row_ids ? p.row_ids[row] : row, position / 4).word[position % 4];
    case KeyKind::f32:
      return ordered_key(static_cast<const float*>(p.keys)[at]);
    case KeyKind::bf16:
      return ordered_key(widen(static_cast<const Bf16*>(p.keys)[at]));
    case KeyKind::f16:
      return ordered_key(widen(static_cast<const Half*>(p.keys)[at]));
    case KeyKind::f64:
      return ordered_key(static_cast<const double*>(p.keys)[at]);
    default:
      return 0;
  }
}

void select_row(const SelectParams& p, int64_t row, std::vector<Candidate>& candidates) {
  const uint8_t* mask = p.mask + row * p.length;
  int64_t* indices = p.indices + row * p.size;
  bool* valid = p.valid + row * p.size;
  int64_t room = p.max_kept;
  if (p.limit) room = std::clamp<int64_t>(p.limit[row], 0, room);

  int64_t count = 0;
  for (int64_t i = 0; i < p.length; ++i) count += mask[i] != 0;
  const int64_t kept = std::min(count, room);
  if (p.key_kind == KeyKind::none || kept == count) {
    for (int64_t i = 0, at = 0; at < kept; ++i) {
      if (mask[i]) indices[at++] = i;
    }
  } else if (kept > 0) {
    candidates.clear();
    for (int64_t i = 0; i < p.length; ++i) {
      if (mask[i]) candidates.push_back({key_of(p, row, i), i});
    }
    std::nth_element(candidates.begin(), candidates.begin() + (kept - 1), candidates.end());
    for (int64_t i = 0; i < kept; ++i) indices[i] = candidates[i].position;
    std::sort(indices, indices + kept);
  }
  std::fill(valid, valid + kept, true);
  std::fill(valid + kept, valid + p.size, false);
  std::fill(indices + kept, indices + p.size, p.fill_value);
  p.count[row] = count;
}

}  // namespace

void select_cpu(const SelectParams& p) {
  parallel(p.rows, p.length + p.size, [&](int64_t begin, int64_t end) {
    std::vector<Candidate> candidates;
    for (int64_t row = begin; row < end; ++row) select_row(p, row, candidates);
  });
}

}  // namespace syncfree
