// Keys to select by: integers in the order of floating-point numbers, and random numbers from a counter. Compiled for
// host and device, so that both select alike.
#pragma once

#include <cstdint>

#include "formulas.h"

namespace syncfree {

// The order of a stable sort: -inf ... -0 = +0 ... +inf, NaN (any NaN is like any other).
SF_HOST_DEVICE uint32_t ordered_key(float x) {
  if (x != x) return 0xffffffffu;
  union {
    float f;
    uint32_t u;
  } bits;
  bits.f = x + 0.0f;  // -0 becomes +0
  return bits.u ^ (bits.u >> 31 ? 0xffffffffu : 0x80000000u);
}

SF_HOST_DEVICE uint64_t ordered_key(double x) {
  if (x != x) return ~uint64_t(0);
  union {
    double f;
    uint64_t u;
  } bits;
  bits.f = x + 0.0;
  return bits.u ^ (bits.u >> 63 ? ~uint64_t(0) : uint64_t(1) << 63);
}

struct Philox4 {
  uint32_t word[4];
};

// Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011).
SF_HOST_DEVICE Philox4 philox(uint64_t seed, Philox4 counter) {
  uint32_t key_0 = uint32_t(seed), key_1 = uint32_t(seed >> 32);
  Philox4 c = counter;
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c.word[0], b = uint64_t(0xCD9E8D57u) * c.word[2];
    c = {{uint32_t(b >> 32) ^ c.word[1] ^ key_0, uint32_t(b), uint32_t(a >> 32) ^ c.word[3] ^ key_1, uint32_t(a)}};
    key_0 += 0x9E3779B9u;
    key_1 += 0xBB67AE85u;
  }
  return c;
}

// The keys of positions 4 * group ... 4 * group + 3 of a row.
SF_HOST_DEVICE Philox4 philox_keys(uint64_t seed, int64_t row_id, int64_t group) {
  const uint64_t row = uint64_t(row_id), g = uint64_t(group);
  return philox(seed, {{uint32_t(g), uint32_t(row), uint32_t(row >> 32), uint32_t(g >> 32)}});
}

}  // namespace syncfree
