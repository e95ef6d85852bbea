// Positions that are set, a fixed number for each row: the first ones, or those with the smallest keys. A block a row.
//
// 1. With keys: radix select. Each pass counts the next kDigitBits bits of the keys that agree with the prefix found so
//    far, and the scan of the counts names the digit in which the last key to keep lies. It ends as soon as every key
//    of that digit is kept: after one or two passes for random keys; at the latest when all bits are known, and what
//    is left are ties.
// 2. Emission, in order of positions: a scan over the block ranks the keys below the prefix and those equal to it; of
//    the latter the first ones fill what is left. Without keys the prefix is empty, so all are equal: the same code.
// Bytes: mask and keys once for each pass; Philox keys are computed again in each. 9 for each column written.
#include <type_traits>

#include "../../common/keys.h"
#include "../../common/loop_params.h"
#include "device.cuh"
#include "launch.h"

namespace syncfree {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kEach = 4;  // consecutive positions of a thread: one Philox call, one load of four flags
constexpr int64_t kTile = kThreads * kEach;
constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;
static_assert(kDigits == 2 * kThreads);

struct Shared {
  unsigned histogram[kDigits];
  uint64_t warp_total[2][kWarps];
  // What the thread that finds the digit tells the others.
  int digit;
  int64_t left, in_digit;
};

// Inclusive over the block; `buffer` alternates between calls, which saves a barrier. total: over the block.
__device__ __forceinline__ uint64_t block_scan(uint64_t x, uint64_t* buffer, uint64_t& total) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const uint64_t left = __shfl_up_sync(0xffffffffu, x, offset);
    if (lane >= offset) x += left;
  }
  if (lane == kWarp - 1) buffer[warp] = x;
  __syncthreads();
  uint64_t sums = buffer[lane];
#pragma unroll
  for (int offset = 1; offset < kWarps; offset *= 2) {
    const uint64_t left = __shfl_up_sync(0xffffffffu, sums, offset);
    if (lane >= offset) sums += left;
  }
  total = __shfl_sync(0xffffffffu, sums, kWarps - 1);
  const uint64_t before = __shfl_sync(0xffffffffu, sums, warp ? warp - 1 : 0);
  return warp ? x + before : x;
}
static_assert(kWarps == kWarp);

// Bit e: position base + e is set.
__device__ __forceinline__ unsigned flags_at(const uint8_t* mask, int64_t base, int64_t length) {
  unsigned flags = 0;
  if (base + kEach <= length && (reinterpret_cast<uintptr_t>(mask + base) & 3) == 0) {
    const uchar4 m = *reinterpret_cast<const uchar4*>(mask + base);
    return (m.x ? 1u : 0u) | (m.y ? 2u : 0u) | (m.z ? 4u : 0u) | (m.w ? 8u : 0u);
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    if (base + e < length && mask[base + e]) flags |= 1u << e;
  }
  return flags;
}

__device__ __forceinline__ uint64_t ordered_element(double x) {
  return ordered_key(x);
}
template <class T>
__device__ __forceinline__ uint32_t ordered_element(T x) {
  return ordered_key(to_float(x));
}

template <class T>
struct ArrayKeys {
  using Key = decltype(ordered_element(T()));
  const T* keys;
  __device__ ArrayKeys(const SelectParams& p, int64_t row) : keys(static_cast<const T*>(p.keys) + row * p.length) {}
  // Only of positions that are set: others may lie behind the end.
  __device__ __forceinline__ void load(int64_t base, unsigned flags, Key (&out)[kEach]) const {
#pragma unroll
    for (int e = 0; e < kEach; ++e) out[e] = flags >> e & 1 ? ordered_element(keys[base + e]) : Key(0);
  }
};

struct PhiloxKeys {
  using Key = uint32_t;
  uint64_t seed;
  int64_t row_id;
  __device__ PhiloxKeys(const SelectParams& p, int64_t row) : seed(p.seed), row_id(p.row_ids ? p.row_ids[row] : row) {}
  __device__ __forceinline__ void load(int64_t base, unsigned flags, Key (&out)[kEach]) const {
    if (!flags) return;
    const Philox4 words = philox_keys(seed, row_id, base / kEach);
#pragma unroll
    for (int e = 0; e < kEach; ++e) out[e] = words.word[e];
  }
};

struct NoKeys {
  using Key = uint32_t;
  __device__ NoKeys(const SelectParams&, int64_t) {}
  __device__ __forceinline__ void load(int64_t, unsigned, Key (&out)[kEach]) const {
#pragma unroll
    for (int e = 0; e < kEach; ++e) out[e] = 0;
  }
};

// Keys with (key & known) < prefix are kept, and the first `ties` of those that are equal to it.
template <class Key>
struct Threshold {
  Key known, prefix;
  int64_t ties;
};

template <class Keys>
__device__ Threshold<typename Keys::Key> find_threshold(const SelectParams& p, const uint8_t* mask, const Keys& keys,
                                                        int64_t room, int64_t& count, Shared& shared) {
  using Key = typename Keys::Key;
  constexpr int kBits = int(sizeof(Key)) * 8;
  Threshold<Key> t{0, 0, room};
  int buffer = 0;
  for (int bits_left = kBits; bits_left > 0;) {
    const int bits = bits_left < kDigitBits ? bits_left : kDigitBits, shift = bits_left - bits;
    shared.histogram[threadIdx.x] = shared.histogram[threadIdx.x + kThreads] = 0;
    __syncthreads();
    for (int64_t base = threadIdx.x * kEach; base < p.length; base += kTile) {
      const unsigned flags = flags_at(mask, base, p.length);
      Key key[kEach] = {};
      keys.load(base, flags, key);
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if ((flags >> e & 1) && (key[e] & t.known) == t.prefix)
          atomicAdd(&shared.histogram[int(key[e] >> shift) & (kDigits - 1) & ((1 << bits) - 1)], 1u);
      }
    }
    __syncthreads();
    const unsigned low = shared.histogram[2 * threadIdx.x], high = shared.histogram[2 * threadIdx.x + 1];
    uint64_t total = 0;
    const int64_t through = int64_t(block_scan(uint64_t(low) + high, shared.warp_total[buffer ^= 1], total));
    if (bits_left == kBits) {
      count = int64_t(total);
      if (room <= 0 || count <= room) return t;  // none or all: no key decides
    }
    const int64_t before = through - low - high;
    if (before < t.ties && t.ties <= through) {  // one thread: the ranges are disjoint
      const bool upper = t.ties > before + low;
      shared.digit = 2 * threadIdx.x + upper;
      shared.left = t.ties - before - (upper ? low : 0);
      shared.in_digit = upper ? high : low;
    }
    __syncthreads();
    t.prefix |= Key(shared.digit) << shift;
    t.known |= ((Key(1) << bits) - 1) << shift;
    t.ties = shared.left;
    if (shared.left == shared.in_digit) break;
    bits_left = shift;
    __syncthreads();  // what the others read is written again
  }
  return t;
}

template <class Keys>
__global__ void __launch_bounds__(kThreads) select_kernel(const __grid_constant__ SelectParams p) {
  using Key = typename Keys::Key;
  __shared__ Shared shared;
  const int64_t row = blockIdx.x;
  const uint8_t* mask = p.mask + row * p.length;
  int64_t* indices = p.indices + row * p.size;
  bool* valid = p.valid + row * p.size;
  int64_t room = p.max_kept;
  if (p.limit) room = p.limit[row] < 0 ? 0 : p.limit[row] < room ? p.limit[row] : room;

  const Keys keys(p, row);
  constexpr bool kHasKeys = !std::is_same_v<Keys, NoKeys>;
  int64_t count = 0;
  Threshold<Key> t{0, 0, room};
  if constexpr (kHasKeys) {
    t = find_threshold(p, mask, keys, room, count, shared);
    room = count < room ? count : room;
    __syncthreads();  // warp_total is written again
  }

  // Both counts in one scan: those below in the upper half.
  int64_t below_before = 0, equal_before = 0;
  int buffer = 0;
  for (int64_t start = 0; start < p.length; start += kTile) {
    if (kHasKeys && below_before + (equal_before < t.ties ? equal_before : t.ties) >= room) break;
    const int64_t base = start + threadIdx.x * kEach;
    const unsigned flags = flags_at(mask, base, p.length);
    Key key[kEach] = {};
    keys.load(base, flags, key);
    unsigned below = 0, equal = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const Key head = key[e] & t.known;
      below |= (flags >> e & 1) && head < t.prefix ? 1u << e : 0u;
      equal |= (flags >> e & 1) && head == t.prefix ? 1u << e : 0u;
    }
    const uint64_t own = uint64_t(__popc(below)) << 32 | unsigned(__popc(equal));
    uint64_t total = 0;
    const uint64_t before = block_scan(own, shared.warp_total[buffer ^= 1], total) - own;
    int64_t below_at = below_before + int64_t(before >> 32), equal_at = equal_before + int64_t(before & 0xffffffffu);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const bool is_below = below >> e & 1, is_equal = equal >> e & 1;
      if (is_below || (is_equal && equal_at < t.ties)) {
        const int64_t at = below_at + (equal_at < t.ties ? equal_at : t.ties);
        if (at < room) indices[at] = base + e;
      }
      below_at += is_below;
      equal_at += is_equal;
    }
    below_before += int64_t(total >> 32);
    equal_before += int64_t(total & 0xffffffffu);
  }
  if constexpr (!kHasKeys) {
    count = equal_before;
    room = count < room ? count : room;
  }
  for (int64_t i = threadIdx.x; i < p.size; i += kThreads) {
    valid[i] = i < room;
    if (i >= room) indices[i] = p.fill_value;
  }
  if (threadIdx.x == 0) p.count[row] = count;
}

}  // namespace

cudaError_t launch_select(const SelectParams& p, cudaStream_t stream) {
  const dim3 grid{unsigned(p.rows)};
  switch (p.key_kind) {
    case KeyKind::none:
      select_kernel<NoKeys><<<grid, kThreads, 0, stream>>>(p);
      break;
    case KeyKind::philox:
      select_kernel<PhiloxKeys><<<grid, kThreads, 0, stream>>>(p);
      break;
    case KeyKind::f32:
      select_kernel<ArrayKeys<float>><<<grid, kThreads, 0, stream>>>(p);
      break;
    case KeyKind::bf16:
      select_kernel<ArrayKeys<__nv_bfloat16>><<<grid, kThreads, 0, stream>>>(p);
      break;
    case KeyKind::f16:
      select_kernel<ArrayKeys<__half>><<<grid, kThreads, 0, stream>>>(p);
      break;
    case KeyKind::f64:
      select_kernel<ArrayKeys<double>><<<grid, kThreads, 0, stream>>>(p);
      break;
  }
  return cudaGetLastError();
}

}  // namespace syncfree
