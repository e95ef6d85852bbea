// The targets, read once: how many rows count, the divisors, and the order in which rows are worked on.
#include <cmath>
#include <stdexcept>

#include "../common/formulas.h"
#include "backend.h"
#include "numbers.h"

namespace syncfree {
namespace {

// Sums in double and in order: at most a few hundred thousand terms, and the same on any number of threads.
template <class T>
void count_rows(const CountParams& p) {
  const T* weight = static_cast<const T*>(p.weight);
  const T* token_weight = static_cast<const T*>(p.token_weight);
  const T* upstream = static_cast<const T*>(p.upstream);
  const auto source = [&](int64_t i) { return i % p.sequence + p.shift < p.sequence ? i + p.shift : int64_t(-1); };
  const auto scored = [&](int64_t i) {
    const int64_t s = source(i);
    return s >= 0 && p.target[s] != p.ignore_index;
  };

  int64_t count = 0;
  for (int64_t i = 0; i < p.rows; ++i) {
    if (!scored(i)) continue;
    const int64_t t = p.target[source(i)];
    if (t < 0 || t >= p.num_classes) {
      throw std::out_of_range(message("syncfree: target: expected a class in [0, ", p.num_classes, ") or ignore_index ",
                                      p.ignore_index, ", got ", t, " at position ", source(i)));
    }
    ++count;
  }

  double summed_weight = 0, max_multiplier = 0;
  int64_t next_live = 0, next_ignored = count;
  for (int64_t i = 0; i < p.rows; ++i) {
    if (!scored(i)) {
      p.row_index[next_ignored++] = int32_t(i);
      continue;
    }
    p.row_index[next_live++] = int32_t(i);
    if (weight) summed_weight += weight[p.target[source(i)]];
    const double multiplier = (token_weight ? double(token_weight[source(i)]) : 1.0) *
                              (upstream ? double(upstream[i * p.upstream_stride]) : 1.0);
    max_multiplier = std::fmax(max_multiplier, std::fabs(multiplier));
  }

  double classes = double(p.num_classes), max_weight = 1;
  if (weight) {
    classes = max_weight = 0;
    for (int64_t j = 0; j < p.num_classes; ++j) {
      classes += weight[j];
      max_weight = std::fmax(max_weight, std::fabs(double(weight[j])));
    }
  } else {
    summed_weight = double(count);
  }

  write_counts(p.counts, double(count), summed_weight, classes, max_weight,
               token_weight || upstream ? max_multiplier : 1.0, p.reduction, weight != nullptr, p.num_items);
}

}  // namespace

void count_cpu(const CountParams& p) {
  with_acc(p.acc, [&](auto tag) { count_rows<typename decltype(tag)::type>(p); });
}

}  // namespace syncfree
